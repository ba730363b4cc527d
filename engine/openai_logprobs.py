"""Log-probabilities in OpenAI's two shapes. Pure."""

from collections.abc import Sequence
from itertools import accumulate

import msgspec

from tercet.ipc.answers import TokenLogprob

Rows = Sequence[Sequence[TokenLogprob]]


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
    if not rows:
        return None
    content = []
    for own, *others in rows:
        top = [TopLogprob(one.text, one.logprob, list(one.token)) for one in others]
        content.append(ChatLogprob(own.text, own.logprob, list(own.token), top))
    return ChatLogprobs(content)


def completion_logprobs(rows: Rows | None, offset: int) -> CompletionLogprobs | None:
    """`offset`: characters of the answer before these tokens."""
    if rows is None:
        return None
    tokens = [row[0].text for row in rows]
    offsets = list(accumulate(map(len, tokens), initial=offset))[:-1]
    top: list[dict[str, float] | None] = [{one.text: one.logprob for one in reversed(row)} for row in rows]
    return CompletionLogprobs(tokens, [row[0].logprob for row in rows], top, offsets)


def prompt_logprobs(rows: Rows | None, num_top: int) -> PromptLogprobs | msgspec.UnsetType:
    """A place for each token of the prompt, the first of which has no log-probability. Nothing if nobody asked."""
    if rows is None:
        return msgspec.UNSET
    shown: PromptLogprobs = [None]
    for row in rows:
        likely = row[: 1 + num_top]
        shown.append({str(one.token_id): PromptLogprob(one.logprob, one.rank, one.text) for one in likely})
    return shown
