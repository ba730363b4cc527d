"""Log-probabilities in OpenAI's two shapes. Those of whole answers and prompts, which may be many, are made as they are
sent. Pure.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import tee
from typing import Any

import msgspec

from tercet.engine.json_parts import LATER, as_list, encode, in_runs, run
from tercet.ipc.answers import TokenLogprob
from tercet.ipc.messages import MAX_LOGPROBS

Row = Sequence[TokenLogprob]
Rows = Sequence[Row]
Later = list[Iterable[bytes]]
"""What stands in an answer as `LATER`, in its order."""


class TopLogprob(msgspec.Struct, frozen=True):
    """A token that might have come."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    """A token of the answer, and the likeliest in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs` of chat completions."""

    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs` of completions."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """None: of a prompt's first token."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    """A token of the prompt, or one that might have stood there; vLLM's shape, by token id."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


def chat_logprobs(rows: Rows | None) -> ChatLogprobs | None:
    """None if nobody asked, or of no token."""
    return ChatLogprobs([_chat_row(row) for row in rows]) if rows else None


def later_chat_logprobs(rows: Rows | None, later: Later) -> ChatLogprobs | None:
    """The same, of any number."""
    return ChatLogprobs(later_rows(rows, later)) if rows else None


def later_rows(rows: Rows, later: Later) -> Any:
    """A list of `ChatLogprob`, made as it is sent."""
    later.append(as_list(in_runs(rows, _chat_row)))
    return LATER


def written_rows(rows: Rows) -> list[Any]:
    """The same, made now: each as it is sent, as often as that may be."""
    return [msgspec.Raw(encode(_chat_row(row))) for row in rows]


def _chat_row(row: Row) -> ChatLogprob:
    own, *others = row
    top = [TopLogprob(one.text, one.logprob, list(one.token)) for one in others]
    return ChatLogprob(own.text, own.logprob, list(own.token), top)


def completion_logprobs(rows: Rows | None, offset: int) -> CompletionLogprobs | None:
    """`offset`: characters of the answer that have begun before these tokens."""
    if rows is None:
        return None
    return CompletionLogprobs(
        [_own_text(row) for row in rows],
        [_own_logprob(row) for row in rows],
        [_likely(row) for row in rows],
        list(_places(rows, offset)),
    )


def num_begun(rows: Rows) -> int:
    """Characters that begin in these tokens."""
    return sum(_num_begun(row[0].token) for row in rows)


class Columns(msgspec.Struct, frozen=True):
    """What a `CompletionLogprobs` is made of, as it is sent: runs of elements of each of its lists."""

    tokens: Iterable[bytes]
    token_logprobs: Iterable[bytes]
    top_logprobs: Iterable[bytes]
    text_offset: Iterable[bytes]


def columns(rows: Rows, offset: int, num_top: int = MAX_LOGPROBS) -> Columns:
    """Of any number of rows, each of which may have more than `num_top` others.

    `offset`: -1 if the text lacks the first one's space.
    """
    return Columns(
        in_runs(rows, _own_text),
        in_runs(rows, _own_logprob),
        in_runs(rows, partial(_likely, num_top=num_top)),
        _offsets(rows, offset),
    )


def copies(one: Columns, count: int) -> list[Columns]:
    """To be sent one after the other; what is in them is made once."""
    parts = [tee(getattr(one, name), count) for name in Columns.__struct_fields__]
    return [Columns(*each) for each in zip(*parts, strict=True)]


def later_completion_logprobs(parts: Sequence[Columns], later: Later) -> CompletionLogprobs:
    """Of what comes one after the other."""
    later += [as_list(*[getattr(part, name) for part in parts]) for name in Columns.__struct_fields__]
    return CompletionLogprobs(LATER, LATER, LATER, LATER)


def _own_text(row: Row) -> str:
    return row[0].text


def _own_logprob(row: Row) -> float:
    return row[0].logprob


def _likely(row: Row, num_top: int = MAX_LOGPROBS) -> dict[str, float]:
    return {one.text: one.logprob for one in reversed(row[: 1 + num_top])}


def _offsets(rows: Rows, offset: int) -> Iterator[bytes]:
    places = _places(rows, offset)
    return in_runs(rows, lambda _: next(places))


def _places(rows: Rows, offset: int) -> Iterator[int]:
    """Where each token begins in a text. One that goes on with a character begins where that one does."""
    for row in rows:
        token = row[0].token
        yield max(offset - _goes_on(token), 0)
        offset += _num_begun(token)


def _num_begun(token: bytes) -> int:
    return len(token) if token.isascii() else sum(byte & 0xC0 != 0x80 for byte in token)


def _goes_on(token: bytes) -> bool:
    return bool(token) and token[0] & 0xC0 == 0x80


def prompt_logprobs(rows: Rows, num_top: int) -> Iterator[bytes]:
    """A list with a place for each token of the prompt, the first of which has no log-probability; as it is sent."""
    return as_list([run([None])], in_runs(rows, partial(_prompt_row, num_top=num_top)))


def _prompt_row(row: Row, num_top: int) -> dict[str, PromptLogprob]:
    return {str(one.token_id): PromptLogprob(one.logprob, one.rank, one.text) for one in row[: 1 + num_top]}
