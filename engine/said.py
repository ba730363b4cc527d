"""What a reader makes of an answer's text, whichever way the model writes. Types only."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from tercet.engine.tool_calls import Call

Span = tuple[int, int]
"""Characters of the answer's text, from one to before another."""


class Said(NamedTuple):
    """One of these is new."""

    reasoning: str = ""
    content: str = ""
    call: Call | None = None
    span: Span | None = None
    """Where in the text that stands, if the reader knows; empty: nowhere, the reader has put it in."""


class AnswerReader(ABC):
    """Of one answer. Fed text, and the tokens that have come with it, however both are cut."""

    @abstractmethod
    def feed(self, text: str, token_ids: Sequence[int]) -> list[Said]:
        """What has become clear with this text. It may come behind its tokens, and not ahead of them."""

    @abstractmethod
    def finish(self) -> list[Said]:
        """The rest, when no more text comes."""

    @property
    def is_plain(self) -> bool:
        """All text from now on is content: it need not be fed."""
        return False

    def num_thought(self, token_ids: Sequence[int]) -> int | None:
        """How many of all the answer's tokens are reasoning, with what is around it; None: it cannot tell."""
        return None
