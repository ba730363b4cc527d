"""What a client may have to deal with: a small tree of errors, and which of them each of the engine's codes is."""

from typing import Any

from tercet.ipc.answers import Failed


class ClientError(Exception):
    """What a client may have to deal with. `code` is the engine's word for it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:  # its `args` hold the message alone; else no worker process could raise it
        return type(self), (self.code, str(self)), self.__dict__


class RequestRefused(ClientError):
    """The request cannot be served as it is; the message says what to change."""


class Overloaded(ClientError):
    """The engine takes no more now; ask again later, or elsewhere."""

    def __init__(self, code: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(code, message)
        self.retry_after = retry_after
        """Seconds after which it is worth asking again, where the engine knows."""


class EngineDied(ClientError):
    """The engine is gone, was never there, or speaks another protocol; what it had not sent is lost."""


class RequestTimedOut(ClientError, TimeoutError):
    """The request waited or took longer than the caller allowed, and was cancelled."""


def error_of(failed: Failed) -> ClientError:
    match failed.code:
        case "overloaded" | "draining" | "slow_client" | "asleep" | "aborted":
            return Overloaded(failed.code, failed.message, failed.retry_after)
        case "engine_died":
            return EngineDied(failed.code, failed.message)
        case "timed_out":
            return RequestTimedOut(failed.code, failed.message)
        case code:
            return RequestRefused(code, failed.message)
