"""What a step has to say beyond its tokens: from workers to the scheduler, and on to the tokenizer.

Parts of the messages in `step_messages.py`.
"""

import msgspec


class Logs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Log-probabilities of some rows: int32 words of each, bits of floats among them (see `engine/logprobs.py`)."""

    rows: bytes
    """int32: of which rows, or which places among numbers."""
    num_top: int
    words: bytes


class PromptLogs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The same of consecutive tokens of a prompt."""

    row: int
    """From workers, the row of the step; from the scheduler, the request's number."""
    position: int
    num_top: int
    words: bytes


class Vector(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The embedding of a prompt."""

    row: int
    """As of `PromptLogs`."""
    values: bytes
    """fp32; none where some of them are no numbers, since the model overflows its type."""


Beyond = tuple[Logs | None, tuple[PromptLogs, ...], tuple[Vector, ...]]
"""Of one step, all of it."""
