"""Where the HTTP door may be, by what name it may be asked, with what keys, and for pages of which origins. It opens no
socket."""

import ipaddress
import re

_ORIGIN = re.compile(r"https?://[^\s/?#@*,]+")


def parse_http_address(address: str) -> tuple[str, int]:
    """Host and port of `127.0.0.1:8000` or `[::1]:8000`."""
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError(f"--http got {address!r}; want HOST:PORT, as in 127.0.0.1:8000")
    return host.removeprefix("[").removesuffix("]"), int(port)


def http_url(address: str) -> str:
    """What a person types into a browser."""
    host, port = parse_http_address(address)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def check_http(address: str | None, api_keys: tuple[str, ...]) -> None:
    """Refuse, with a `ValueError`, what cannot or should not be served."""
    for key in api_keys:
        if not (8 <= len(key) <= 512 and key.isascii() and key.isprintable() and " " not in key):
            raise ValueError(
                f"--api-key got a key of {len(key)} characters; want 8 to 512 printable ASCII characters, no spaces"
            )
    if address is None:
        if api_keys:
            raise ValueError("--api-key guards the HTTP door, and there is none; want --http HOST:PORT as well")
        return
    host, _ = parse_http_address(address)
    if not api_keys and not _is_loopback(host):
        raise ValueError(
            f"--http got {address!r}, which others can reach; want a loopback address, as in 127.0.0.1:8000, "
            "or an --api-key"
        )


def check_origins(origins: tuple[str, ...], address: str | None) -> None:
    """Refuse, with a `ValueError`, what is no origin."""
    if origins and address is None:
        raise ValueError("--allowed-origins is about the HTTP door, and there is none; want --http HOST:PORT as well")
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"--allowed-origins got {origin!r}; want such as https://chat.example.com, or * for all")


def is_domain(host: str) -> bool:
    """Whether a request's `Host` header is a name that somebody elsewhere may own: no address, no name of one word.

    A page from elsewhere cannot read what a door says, unless its own name is made to lead here: then it still says
    that name.
    """
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].rstrip(".")
    return "." in name and not name.lower().endswith(".localhost") and _ip(name) is None


def _is_loopback(host: str) -> bool:
    address = _ip(host)
    return host == "localhost" if address is None else address.is_loopback


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
