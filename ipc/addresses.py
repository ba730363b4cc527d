"""Where the sockets of one engine live.

The processes of an engine find each other in a private directory that only its owner may enter; clients come through
the `listen` addresses. This module makes names and refuses unusable ones; it opens no socket.
"""

import ipaddress
import tempfile
from pathlib import Path

import msgspec

_LONGEST_IPC_PATH = 107
"""What `sockaddr_un` of Linux holds."""


class Replica(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Meeting points of one replica of the model."""

    scheduler: str
    workers: tuple[str, ...]
    """Inbox of each rank."""
    rendezvous: str
    """File through which the ranks find each other; each incarnation adds its own ending."""


class Addresses(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every meeting point of one engine."""

    directory: str
    """Mode 0700; the engine removes it when it ends."""
    tokenizer: str
    """Inbox of the tokenizer."""
    listen: tuple[str, ...]
    """Front doors: the tokenizer serves clients on each."""
    replicas: tuple[Replica, ...]


def make_addresses(
    num_workers: int, listen: tuple[str, ...] = (), *, keyed: bool = False, num_replicas: int = 1
) -> Addresses:
    """Make the private directory and name everything in it: of each replica so many workers. Without `listen` the
    front door is in there as well."""
    for address in listen:
        check_listen_address(address, keyed=keyed)
    directory = Path(tempfile.mkdtemp(prefix="tercet-"))  # 0700 by mkdtemp's contract
    inside = {name: f"ipc://{directory}/{name}" for name in ("tokenizer", "clients")}
    addresses = Addresses(
        directory=str(directory),
        tokenizer=inside["tokenizer"],
        listen=listen or (inside["clients"],),
        replicas=tuple(
            Replica(
                scheduler=f"ipc://{directory}/scheduler-{replica}",
                workers=tuple(f"ipc://{directory}/worker-{replica}-{rank}" for rank in range(num_workers)),
                rendezvous=str(directory / f"rendezvous-{replica}"),
            )
            for replica in range(num_replicas)
        ),
    )
    try:
        last = addresses.replicas[-1]
        for address in (last.scheduler, *last.workers[-1:]):
            check_ipc_path(address)
    except ValueError:
        directory.rmdir()
        raise
    return addresses


def check_listen_address(address: str, *, keyed: bool = False) -> None:
    """Refuse, with a `ValueError`, what clients could not or should not be served on. `keyed`: they need a key."""
    if address.startswith("ipc://"):
        try:
            check_ipc_path(address)
        except ValueError as error:
            raise ValueError(f"--listen: {error}") from None
    elif address.startswith("tcp://"):
        _check_tcp(address, keyed)
    else:
        raise ValueError(f"--listen got {address!r}; want ipc://PATH or tcp://HOST:PORT")


def is_ipv6(address: str) -> bool:
    """Whether its host is one of IPv6, which a socket has to be told before it binds or connects there.

    Told so for a name, it would look for no other address behind that.
    """
    return address.startswith("tcp://") and ":" in address.removeprefix("tcp://").rpartition(":")[0]


def check_ipc_path(address: str) -> Path:
    """The file of an ipc:// address that a socket can have."""
    path = address.removeprefix("ipc://")
    if not path or path.startswith("@") or path == "*" or "\0" in path:
        raise ValueError(f"got address {address!r}; want ipc:// and the path of a file")
    if len(path.encode()) > _LONGEST_IPC_PATH:
        raise ValueError(
            f"the socket path {path!r} has {len(path.encode())} bytes; want at most {_LONGEST_IPC_PATH} "
            "(a shorter TMPDIR helps where the path is made up)"
        )
    return Path(path)


def _check_tcp(address: str, keyed: bool) -> None:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError(f"--listen got {address!r}; want a port from 1 to 65535, as in tcp://127.0.0.1:5555")
    if host == "localhost":
        return
    try:
        ip = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        ip = None
    if ip is None and keyed:
        raise ValueError(f"--listen got {address!r}; want the IP address of an interface, as in tcp://0.0.0.0:{port}")
    if not keyed and (ip is None or not ip.is_loopback):
        raise ValueError(
            f"--listen got {address!r}; want a loopback address, as in tcp://127.0.0.1:{port}, or a --listen-key: "
            "without one, whoever reaches the port may use the engine"
        )
