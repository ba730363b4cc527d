"""A key for doors that others can reach: whoever has it gets in, and everything is encrypted (ZeroMQ's CURVE).

One secret text makes two key pairs, the engine's and its clients'. An engine that does not have the text cannot pose
as one that does, a client without it is refused in the handshake, and nothing secret is ever sent or compared.
"""

import hmac
import threading
from hashlib import blake2b

import zmq
import zmq.utils.z85

_DOMAIN = b"tercet"
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_LENGTHS = 32, 512


def check_key(key: str) -> None:
    """Refuse, with a `ValueError`, a key that could be guessed."""
    low, high = _LENGTHS
    if not (low <= len(key) <= high and key.isascii() and key.isprintable()):
        raise ValueError(
            f"--listen-key got a key of {len(key)} characters; want {low} to {high} printable ASCII characters, "
            "as from `openssl rand -hex 32`"
        )


def key_pair(key: str, owner: str) -> tuple[bytes, bytes]:
    """Public and secret key of `server` or `client`, in ZeroMQ's Z85 text."""
    digest = blake2b(key.encode(), digest_size=32, person=f"tercet {owner}".encode()).digest()
    secret = zmq.utils.z85.encode(digest)
    return zmq.curve_public(secret), secret


def guard(socket: zmq.Socket[bytes], key: str) -> None:
    """Before it is bound: this socket speaks only to clients that have the key."""
    context = socket.context
    expected = zmq.utils.z85.decode(key_pair(key, "client")[0])
    requests = context.socket(zmq.REP)
    try:
        requests.bind(_ZAP_ADDRESS)
        threading.Thread(target=_judge, args=(requests, expected), name="door-key", daemon=True).start()
    except zmq.ZMQError as error:
        requests.close(linger=0)
        if error.errno != zmq.EADDRINUSE:  # this context's door had to be bound more than once
            raise
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, key_pair(key, "server")[1])
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)


def unlock(socket: zmq.Socket[bytes], key: str) -> None:
    """Before it connects: this socket has the key."""
    public, secret = key_pair(key, "client")
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, key_pair(key, "server")[0])


def _judge(requests: zmq.Socket[bytes], expected: bytes) -> None:
    """Answer ZeroMQ's question who may enter (its RFC 27), until the context ends."""
    try:
        while True:
            version, number, *_, credentials = requests.recv_multipart()
            welcome = hmac.compare_digest(credentials, expected)
            verdict = (b"200", b"OK") if welcome else (b"400", b"wrong key")
            requests.send_multipart((version, number, *verdict, b"", b""))
    except zmq.ContextTerminated:
        requests.close(linger=0)
