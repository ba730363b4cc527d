"""One JSON line for each HTTP request: who asked for how much and what became of it. Never what was said."""

import time
from datetime import UTC, datetime

import msgspec

from tercet.engine.log_line import log_line

_QUIET = ("/health", "/health/ready", "/metrics")
"""Asked for all the time."""


class Record(msgspec.Struct, omit_defaults=True):
    """What the log says of one request; filled in as it becomes known."""

    request_id: str
    method: str
    path: str
    client: str
    time: str = ""
    status: int = 0
    """499: the client left before the answer was complete."""
    seconds: float = 0.0
    answer_id: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    stream: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reasons: list[str] = msgspec.field(default_factory=list)
    error: str | None = None
    """Its code."""


class RequestLog:
    """Writes to standard error."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    def write(self, record: Record, began: float) -> None:
        """The request has ended; `began` on the monotonic clock."""
        if not self._enabled or record.path in _QUIET:
            return
        record.time = datetime.now(UTC).isoformat(timespec="milliseconds")
        record.seconds = round(time.monotonic() - began, 6)
        log_line(msgspec.json.encode(record).decode())
