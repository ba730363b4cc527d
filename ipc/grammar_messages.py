"""Messages between the scheduler and the processes that compute what an answer with a grammar may go on with.

The engine's own, as those in `step_messages.py`.
"""

import sys

import msgspec


class Follow(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """What may come after these tokens (int32) of an answer that has to match `grammar`? `ticket` names it from now,
    and its masks belong into `row` of the table."""

    ticket: int
    row: int
    grammar: str
    token_ids: bytes


class Extend(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """One more token (int32) of each of these answers (int64): what may come after it?"""

    tickets: bytes
    token_ids: bytes


class Release(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Nobody asks about this one any more."""

    ticket: int


class Allowed(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """What may come next in each of these answers (int64) is in its row."""

    tickets: bytes

    @property
    def first_ticket(self) -> int:
        return int.from_bytes(self.tickets[:8], sys.byteorder)


class Disallowed(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """This answer cannot go on, and why."""

    ticket: int
    message: str

    @property
    def first_ticket(self) -> int:
        return self.ticket


ToGrammars = Follow | Extend | Release
