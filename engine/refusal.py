"""How a request is refused: the field, what came, and what is wanted. Pure; knows no rule."""

import math

RETRY_AFTER_S = 1.0
"""Before it is worth asking again, where what is in the way passes and nobody knows when."""
SHUTTING_DOWN = "the engine is shutting down"
ASLEEP = "the engine is asleep; want it woken up (WakeUp, POST /wake_up) before requests"
TAKES_NO_MORE = f"{SHUTTING_DOWN} and takes no new requests"


class Refusal(Exception):
    """The request will not be run. `code` is for programs, the message for people."""

    def __init__(self, code: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after


def invalid(field: str, got: object, wanted: str) -> Refusal:
    return Refusal("invalid_request", f"{field} is {short(got)}; want {wanted}")


def check_range(field: str, value: float, low: float, high: float) -> None:
    """Refuse what is not a number from `low` to `high`."""
    if not (math.isfinite(value) and low <= value <= high):
        raise invalid(field, value, f"{low} to {high}")


def short(value: object) -> str:
    """For messages: a value of any length."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
