"""What `LLM.generate` gives: the answers of a client, put together for a program that has waited for all."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tercet.ipc.answers import FinishReason, TokenLogprob, Usage
from tercet.ipc.call import Generation, usage_of_all


class CompletionOutput(msgspec.Struct, frozen=True):
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop string or token id that ended it, if one did."""
    logprobs: list[dict[int, TokenLogprob]] | None = None
    """Of each token, by id: itself and the likeliest in its place, if they were asked for."""
    cumulative_logprob: float | None = None


class RequestOutput(msgspec.Struct, frozen=True):
    """What became of one prompt. `prompt` is None where token ids or a conversation were given."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage
    prompt_logprobs: list[dict[int, TokenLogprob] | None] | None = None
    """Of each token of the prompt; None of the first."""


def output_of(prompt: Any, generations: list[Generation]) -> RequestOutput:
    """All answers to one prompt."""
    of_prompt = generations[0].prompt_logprobs
    return RequestOutput(
        prompt["prompt"] if isinstance(prompt, Mapping) else prompt if isinstance(prompt, str) else None,
        list(prompt) if is_ids(prompt) else generations[0].prompt_token_ids or [],
        [_completion(index, generation) for index, generation in enumerate(generations)],
        usage_of_all(generations),
        None if of_prompt is None else [None, *(_by_id(row) for row in of_prompt)],
    )


def is_ids(prompt: Any) -> bool:
    """Else it is a text, or a conversation."""
    return not isinstance(prompt, str | Mapping) and bool(prompt) and isinstance(prompt[0], int)


def _completion(index: int, generation: Generation) -> CompletionOutput:
    logprobs = generation.logprobs
    return CompletionOutput(
        index,
        generation.text,
        generation.token_ids,
        generation.reason,
        generation.stop,
        None if logprobs is None else [_by_id(row) for row in logprobs],
        None if logprobs is None else sum(row[0].logprob for row in logprobs),
    )


def _by_id(row: Sequence[TokenLogprob]) -> dict[int, TokenLogprob]:
    return {one.token_id: one for one in row}
