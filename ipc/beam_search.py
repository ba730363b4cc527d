"""Beam search over a client's log-probabilities: the likeliest answers as wholes, as transformers would find them.

`BeamSearch` knows hypotheses and their scores, and no engine; `beam_search` asks an engine for one token of each live
hypothesis at a time. Their prompts share all but the end, which the engine's prefix cache makes cheap.
"""

import math
from collections.abc import Sequence
from typing import Literal, cast

import anyio
import msgspec

from tercet.ipc.answers import EngineInfo, TokenLogprob
from tercet.ipc.client import Client, RequestRefused
from tercet.ipc.messages import MAX_LOGPROBS, ChatMessage, ChatOptions, SamplingParams
from tercet.ipc.prompt import PlainPrompt
from tercet.ipc.room import too_many_tokens

_LARGEST_LENGTH_PENALTY = 10.0


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to search. The engine's own log-probabilities count: nothing is sampled, and no penalty applies."""

    beam_width: int
    """Hypotheses kept at a time, and answers found. With the model's end-of-sequence ids at most 20."""
    max_tokens: int
    length_penalty: float = 1.0
    """A score is the log-probability divided by the number of tokens to this power: over 0 favours long answers."""
    early_stopping: bool | Literal["never"] = False
    """When `beam_width` answers have ended, go on while a live hypothesis scores better than one of them (False), or
    could yet come to (never), or not at all (True)."""
    ignore_eos: bool = False
    adapter: str | None = None
    """As of `SamplingParams`."""


class Beam(msgspec.Struct, frozen=True):
    """One answer."""

    text: str
    """Without the end-of-sequence token; empty where the checkpoint has no tokenizer."""
    token_ids: list[int]
    reason: Literal["stop", "length"]
    logprob: float
    """Of all its tokens together."""
    score: float


class Hypothesis(msgspec.Struct, frozen=True):
    """The beginning of an answer, or the whole of one."""

    token_ids: tuple[int, ...]
    logprob: float


class BeamSearch:
    """The search for one prompt. Pure."""

    def __init__(self, params: BeamSearchParams, eos_ids: Sequence[int]) -> None:
        """Raises `ValueError` for parameters that make no sense."""
        self._eos_ids = frozenset(() if params.ignore_eos else eos_ids)
        _check(params, len(self._eos_ids))
        self._params = params
        self.live = [Hypothesis((), 0.0)]
        """Best first; none: the search is over."""
        self._ended: list[tuple[float, Hypothesis]] = []

    @property
    def num_candidates(self) -> int:
        """Of the likeliest tokens after each hypothesis: as many must be known as could survive beside all ends."""
        return self._params.beam_width + len(self._eos_ids)

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> None:
        """One step. `candidates`: after each live hypothesis, the likeliest tokens and their log-probabilities."""
        width, length = self._params.beam_width, len(self.live[0].token_ids) + 1
        every = [
            Hypothesis((*live.token_ids, token_id), live.logprob + logprob)
            for live, after in zip(self.live, candidates, strict=True)
            for token_id, logprob in after
        ]
        every.sort(key=lambda hypothesis: -hypothesis.logprob)
        is_last = length == self._params.max_tokens
        # An end counts only if it is among the best: those behind stand in for the ones that end.
        self._ended += [(self._score(one), one) for one in every[:width] if is_last or self.has_eos(one)]
        self._ended.sort(key=lambda ended: -ended[0])
        del self._ended[width:]
        self.live = [] if is_last else [one for one in every if not self.has_eos(one)][:width]
        if self.live and self._is_settled(length):
            self.live = []

    @property
    def ended(self) -> list[tuple[float, Hypothesis]]:
        """Scores and whole answers, best first; final once nothing is live."""
        return self._ended

    def has_eos(self, hypothesis: Hypothesis) -> bool:
        """Whether the model ended it."""
        return hypothesis.token_ids[-1] in self._eos_ids

    def _score(self, hypothesis: Hypothesis) -> float:
        return self._at_length(hypothesis, len(hypothesis.token_ids))

    def _at_length(self, hypothesis: Hypothesis, length: int) -> float:
        return float(hypothesis.logprob / length**self._params.length_penalty)

    def _is_settled(self, length: int) -> bool:
        """Whether no live hypothesis is expected among the best answers any more."""
        params = self._params
        if len(self._ended) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        is_longer_better = params.early_stopping == "never" and params.length_penalty > 0
        best = self._at_length(self.live[0], params.max_tokens if is_longer_better else length)
        return best <= self._ended[-1][0]


async def beam_search(
    client: Client,
    prompt: PlainPrompt,
    params: BeamSearchParams,
    *,
    options: ChatOptions | None = None,
    cache_salt: str = "",
    priority: int = 0,
) -> list[Beam]:
    """The `beam_width` likeliest answers, best first; arguments as of `Client.stream`. Cancelling the task ends it all.

    Raises `ValueError` for parameters that make no sense, and `ClientError` as `Client.generate` does.
    """
    info = await client.info()
    search = BeamSearch(params, info.eos_ids)
    prompt_ids = await _prompt_ids(client, prompt, options)
    _check_room(len(prompt_ids), params.max_tokens, info)
    num_wanted = min(search.num_candidates, info.vocab_size)
    one_token = SamplingParams(temperature=0, max_tokens=1, logprobs=num_wanted, adapter=params.adapter)
    has_text = False
    while search.live:
        rows: list[tuple[TokenLogprob, ...]] = [()] * len(search.live)

        async def ask(index: int, hypothesis: Hypothesis, rows: list[tuple[TokenLogprob, ...]] = rows) -> None:
            ids = [*prompt_ids, *hypothesis.token_ids]
            generation = await client.generate(ids, one_token, cache_salt=cache_salt, priority=priority)
            assert generation.logprobs is not None
            rows[index] = generation.logprobs[0][1:]  # the first is the token that was taken, which stands there again

        try:
            async with anyio.create_task_group() as tasks:
                for index, hypothesis in enumerate(search.live):
                    tasks.start_soon(ask, index, hypothesis)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # the first cancelled the others
        has_text = has_text or any(one.token for row in rows for one in row)
        search.advance([[(one.token_id, one.logprob) for one in row] for row in rows])
    last_id = prompt_ids[-1] if has_text else None
    return [await _beam(client, search, score, one, last_id) for score, one in search.ended]


async def _prompt_ids(client: Client, prompt: PlainPrompt, options: ChatOptions | None) -> list[int]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], ChatMessage)):
        return await client.tokenize(cast("str | Sequence[ChatMessage]", prompt), options=options)
    if options is not None:
        raise ValueError("got options of a chat template; want ChatMessages with them")
    return list(cast("Sequence[int]", prompt))


async def _beam(client: Client, search: BeamSearch, score: float, hypothesis: Hypothesis, last_id: int | None) -> Beam:
    """`last_id`: of the prompt; None: the checkpoint has no tokenizer."""
    token_ids = list(hypothesis.token_ids)
    by_eos = search.has_eos(hypothesis)
    spoken = token_ids[:-1] if by_eos else token_ids
    text = await _text(client, last_id, spoken) if last_id is not None and spoken else ""
    return Beam(text, token_ids, "stop" if by_eos else "length", hypothesis.logprob, score)


async def _text(client: Client, last_id: int, spoken: list[int]) -> str:
    """Of what goes on from a prompt. Alone it would be the beginning of a text, where some decoders drop a space."""
    begin = await client.detokenize([last_id])
    whole = await client.detokenize([last_id, *spoken])
    return whole.removeprefix(begin) if whole.startswith(begin) else await client.detokenize(spoken)


def _check(params: BeamSearchParams, num_eos: int) -> None:
    if not 1 <= params.beam_width <= MAX_LOGPROBS - num_eos:
        raise ValueError(
            f"beam_width is {params.beam_width}; want 1 to {MAX_LOGPROBS - num_eos}: with the model's {num_eos} "
            f"end-of-sequence ids at most {MAX_LOGPROBS}, as many log-probabilities as the engine tells"
        )
    if params.max_tokens < 1:
        raise ValueError(f"max_tokens is {params.max_tokens}; want at least 1")
    limit = _LARGEST_LENGTH_PENALTY
    if not (math.isfinite(params.length_penalty) and -limit <= params.length_penalty <= limit):
        raise ValueError(f"length_penalty is {params.length_penalty}; want {-limit:g} to {limit:g}")
    if params.early_stopping not in (True, False, "never"):
        raise ValueError(f"early_stopping is {params.early_stopping!r}; want True, False or 'never'")


def _check_room(num_prompt: int, max_tokens: int, info: EngineInfo) -> None:
    """Better now than in the middle of the search."""
    if max_tokens > info.max_model_len - num_prompt > 0:
        raise RequestRefused("too_long_for_context", too_many_tokens(max_tokens, num_prompt, info.max_model_len))
