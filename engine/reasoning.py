"""A model's reasoning, told from its answer: what stands between <think> and </think>, or other tags.

Fed text as it comes, however it is cut. It knows nothing of HTTP.
"""

from typing import NamedTuple

from tercet.engine.tool_calls import held_back
from tercet.ipc.answers import ReasoningFormat


class Tags(NamedTuple):
    """What reasoning begins and ends with."""

    opening: str
    closing: str
    name: str = ""
    """What stands behind the opening, which is a token by itself."""


THINK, BRACKETS = Tags("<think>", "</think>"), Tags("[THINK]", "[/THINK]")
CHANNEL = Tags("<|channel>", "<channel|>", "thought")

_SPECIAL_TAGS = {"bracketed": BRACKETS, "bracketed_opened": BRACKETS, "channel": CHANNEL, "channel_opened": CHANNEL}
"""Those that are in the text only where special tokens are."""
_OPENED: dict[ReasoningFormat, ReasoningFormat] = {
    "think": "think_opened",
    "bracketed": "bracketed_opened",
    "channel": "channel_opened",
}
"""Formats in which the model begins the reasoning itself, and the same where the prompt has begun it."""


class Thought(NamedTuple):
    """New text: of the reasoning, and of the answer."""

    reasoning: str
    content: str


def answer_format(model: ReasoningFormat, thinks: object = None) -> ReasoningFormat:
    """Of one answer, of which the template is told whether the model `thinks`, or is told nothing."""
    match model:
        case "think_by_default":
            return "think" if thinks is False else "think_opened"
        case "think_on_request":
            return "think_opened" if thinks else "think"
        case known:
            return known


def tags_of(known: ReasoningFormat) -> Tags:
    """Of a format that has some."""
    return _SPECIAL_TAGS.get(known, THINK)


def has_special_tags(known: ReasoningFormat) -> bool:
    """Whether they are in the text only where special tokens are."""
    return known in _SPECIAL_TAGS


def special_format(source: str) -> ReasoningFormat:
    """That of which a chat template has such tags."""
    if BRACKETS.closing in source:
        return "bracketed"
    return "channel" if CHANNEL.closing in source else "none"


def opened_form(known: ReasoningFormat) -> ReasoningFormat:
    """The same, where the prompt has begun the reasoning."""
    return _OPENED.get(known, "think_opened")


def is_opened(known: ReasoningFormat) -> bool:
    """Whether the prompt has begun the reasoning."""
    return known in _OPENED.values()


def may_open(known: ReasoningFormat) -> bool:
    """Whether the model may begin it itself."""
    return known in _OPENED


class ReasoningReader:
    """Of one answer."""

    def __init__(self, opened: bool, call: str | None = None, tags: Tags = THINK) -> None:
        """`opened`: the prompt has begun the reasoning, so the answer begins in the middle of it. `call`: what calls
        begin with, of a model that may call in the middle of its reasoning, and then has ended it."""
        self._tags = tags
        self._ends = (tags.closing,) if call is None else (tags.closing, call)
        self._rest = ""
        self._state = "reasoning" if opened else "beginning"
        self._skips_space = opened

    @property
    def is_over(self) -> bool:
        """All text from now on is the answer's, as it is."""
        return self._state == "answer" and not self._rest and not self._skips_space

    def feed(self, text: str) -> Thought:
        """What has become clear with this text."""
        self._rest += text
        reasoning = ""
        if self._state == "beginning":
            self._begin()
        if self._state == "reasoning":
            reasoning = self._reason()
        return Thought(reasoning, self._take(len(self._rest)) if self._state == "answer" else "")

    def finish(self) -> Thought:
        """The rest, when no more text comes."""
        rest, self._rest = self._rest, ""
        return Thought(rest, "") if self._state == "reasoning" else Thought("", rest)

    def _begin(self) -> None:
        text = self._rest.lstrip()
        opening = self._tags.opening + self._tags.name
        if text.startswith(opening):
            self._rest, self._state, self._skips_space = text.removeprefix(opening), "reasoning", True
        elif not opening.startswith(text):
            self._state = "answer"

    def _reason(self) -> str:
        found = [at for end in self._ends if (at := self._rest.find(end)) >= 0]
        if not found:
            return self._take(len(self._rest) - max(held_back(self._rest, end) for end in self._ends))
        reasoning = self._take(min(found))
        self._rest, self._state, self._skips_space = self._rest.removeprefix(self._tags.closing), "answer", True
        return reasoning

    def _take(self, length: int) -> str:
        """So much from the beginning, without the white space that follows a tag."""
        text, self._rest = self._rest[:length], self._rest[length:]
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return text
