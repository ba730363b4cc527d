"""Files from other hosts, by HTTP: from those that the operator allows, bounded in time and in size.

It runs in the door's event loop, and in no thread. It knows nothing of images.
"""

import asyncio
import ssl
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from httptools import HttpParserError, HttpResponseParser

from tercet.engine.refusal import short

MAX_BYTES = 50 * 2**20
_SECONDS = 10.0
_MOST_REDIRECTS = 5
_MOST_HEADER_BYTES = 64 * 2**10
_READ_BYTES = 2**16
_OF_PATHS = "/%:@!$&'()*+,;=~-._?"
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_FLAG = "--allowed-media-domains"


class FetchFailed(ValueError):
    """The message says why there is no file."""


class _Place(NamedTuple):
    host: str
    port: int
    is_secure: bool
    target: bytes
    """What is asked for there."""
    shown: bytes
    """The host as its own requests name it."""


class Fetcher:
    """For one door."""

    def __init__(self, hosts: tuple[str, ...]) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._context: ssl.SSLContext | None = None

    async def fetch(self, url: str) -> bytes:
        """Raises `FetchFailed`."""
        try:
            async with asyncio.timeout(_SECONDS):
                for _ in range(1 + _MOST_REDIRECTS):
                    answer = await self._get(self._allowed(url))
                    if answer.location is None:
                        return bytes(answer.body)
                    url = urljoin(url, answer.location)
        except TimeoutError:
            raise FetchFailed(f"did not come within {_SECONDS:g} s") from None
        except (OSError, asyncio.IncompleteReadError) as error:  # of TLS, too
            raise FetchFailed(f"cannot be fetched: {error}") from None
        except HttpParserError as error:
            raise FetchFailed(f"is answered with what is no HTTP: {error}") from None
        raise FetchFailed(f"leads elsewhere more than {_MOST_REDIRECTS} times")

    def _allowed(self, url: str) -> _Place:
        place = _place(url)
        if place.host not in self._hosts:
            allowed = "and there are none" if not self._hosts else f"which are {', '.join(sorted(self._hosts))}"
            raise FetchFailed(f"leads to {short(place.host)!r}; want a data: URL, or a host of {_FLAG}, {allowed}")
        return place

    async def _get(self, place: _Place) -> "_Answer":
        if place.is_secure and self._context is None:
            self._context = ssl.create_default_context()
        tls = self._context if place.is_secure else None
        reader, writer = await asyncio.open_connection(place.host, place.port, ssl=tls)
        try:
            writer.write(
                b"GET " + place.target + b" HTTP/1.1\r\nHost: " + place.shown + b"\r\nAccept: image/*\r\n"
                b"User-Agent: tercet\r\nConnection: close\r\n\r\n"
            )
            answer = _Answer()
            parser = HttpResponseParser(answer)
            while not answer.is_whole and (some := await reader.read(_READ_BYTES)):
                parser.feed_data(some)
                answer.check_header(len(some), parser.get_status_code())
            answer.check_end()
            return answer
        finally:
            writer.close()


class _Answer:
    """What httptools finds in an answer, in pieces."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.location: str | None = None
        self.is_whole = False
        self._is_bounded = False
        """It says itself where it ends."""
        self._has_body = False
        self._num_read = 0
        self._refused: str | None = None

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"location":
                self.location = value.decode("latin-1")
            case b"content-length" | b"transfer-encoding":
                self._is_bounded = True
            case b"content-encoding" if value.strip().lower() != b"identity":
                self._refused = f"comes with Content-Encoding {short(value.decode('latin-1'))}; want it as it is"

    def on_body(self, some: bytes) -> None:
        self._has_body = True
        if len(self.body) + len(some) > MAX_BYTES:
            self._refused = f"has more than {MAX_BYTES} bytes"
        else:
            self.body += some

    def on_message_complete(self) -> None:
        self.is_whole = True

    def check_header(self, num_bytes: int, status: int) -> None:
        """After each piece. Raises `FetchFailed`."""
        self._num_read += num_bytes
        if not self._has_body and not self.is_whole and self._num_read > _MOST_HEADER_BYTES:
            self._refused = "is answered with headers without end"
        if status not in (0, 200, *_REDIRECTS) or (status in _REDIRECTS and self.is_whole and self.location is None):
            self._refused = f"is answered with status {status}"
        if status == 200:
            self.location = None
        elif self.location is not None:
            self.is_whole = True  # what stands there does not matter
        if self._refused is not None:
            raise FetchFailed(self._refused)

    def check_end(self) -> None:
        """Nothing more comes."""
        if not self.is_whole and (self._is_bounded or not self._has_body):
            raise FetchFailed("ends before it is whole")


def _place(url: str) -> _Place:
    if not url.isprintable() or any(letter in url for letter in " \\"):
        raise FetchFailed("has letters that no URL has")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise FetchFailed(f"is no URL: {error}") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise FetchFailed("is no URL of a host's; want http:// or https://")
    if "@" in parts.netloc:
        raise FetchFailed("has a name or a password in it; want it without")
    host = parts.hostname
    if not host.isascii():
        raise FetchFailed(f"leads to {short(host)!r}; want a name in ASCII")
    target = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=_OF_PATHS)
    shown = f"[{host}]" if ":" in host else host
    shown += "" if port is None else f":{port}"
    return _Place(host, port or _PORTS[parts.scheme], parts.scheme == "https", target.encode(), shown.encode())
