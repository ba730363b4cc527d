"""How a client reads what an engine says, and how it notices that the engine speaks another version of the protocol.

Versions whose first two numbers are the same speak the same. It knows no socket.
"""

from importlib import metadata
from typing import Any

import msgspec

from tercet.ipc.answers import EngineInfo, ToClient


class ForeignEngine(ValueError):
    """Who answers cannot be understood, or only by accident; the message says why."""


class Dialect:
    """What engines of this program's version say."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(ToClient)
        self._version = metadata.version("tercet")

    def read(self, encoded: bytes) -> ToClient:
        """Raises `ForeignEngine`."""
        try:
            message: ToClient = self._decoder.decode(encoded)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._check(_version_in(encoded))
            text = f"says what this client of tercet {self._version} cannot read: {error}"
            raise ForeignEngine(text) from None
        if isinstance(message, EngineInfo):
            self._check(message.version)
        return message

    def _check(self, version: str | None) -> None:
        if version is not None and _protocol(version) != _protocol(self._version):
            raise ForeignEngine(
                f"is tercet {version} and this client tercet {self._version}, which speak different protocols; "
                "want versions that begin with the same two numbers"
            )


def _protocol(version: str) -> list[str]:
    return version.split(".")[:2]


def _version_in(encoded: bytes) -> str | None:
    """Where every `EngineInfo` has it, whatever else that is made of."""
    try:
        message: Any = msgspec.msgpack.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    match message:
        case ["EngineInfo", _, str(version), *_]:
            return version
        case _:
            return None
