"""POST /v1/completions: continuations of plain prompts, in OpenAI's shapes."""

from collections.abc import Sequence
from itertools import tee
from typing import Any

import msgspec
from starlette.requests import Request

from tercet.engine.http_answer import Answer
from tercet.engine.http_body import read_body
from tercet.engine.http_door import Door
from tercet.engine.http_echo import Echo, read_echoes, without_answer
from tercet.engine.http_errors import as_http
from tercet.engine.http_events import Chunks, events
from tercet.engine.http_presence import unless_gone
from tercet.engine.http_stream import json_answer
from tercet.engine.json_parts import LATER
from tercet.engine.openai_answers import Completion, CompletionChoice, Usage, finish_reason, given
from tercet.engine.openai_logprobs import (
    Columns,
    Later,
    Rows,
    columns,
    completion_logprobs,
    copies,
    later_completion_logprobs,
    num_begun,
    prompt_logprobs,
)
from tercet.engine.openai_requests import CompletionRequest
from tercet.engine.sse import EventStream
from tercet.ipc.client import Generation, Piece, RequestRefused

_encode = msgspec.json.Encoder().encode


async def complete(request: Request, door: Door) -> Any:
    """The route."""
    body = await read_body(request, CompletionRequest)
    body.check()
    door.check_model(body.model)
    prompts = body.to_prompts()
    answer = Answer(request, door, "cmpl-", prompts, body.to_params(), body)
    chunks = _CompletionChunks(answer, bool(body.return_token_ids))
    if body.stream:
        return EventStream(events(answer.pieces(), chunks, answer, body.wants_usage, body.names))
    echoes: list[Echo] | list[None] = [None] * len(prompts)
    refusal: RequestRefused | None = None
    with as_http(body.names):
        if body.echo:  # asked ahead: in a drain, the tokenizer ends with the last answer
            try:
                echoes = await unless_gone(request.receive, read_echoes(door.client, prompts))
            except RequestRefused as error:
                refusal = error  # what is wrong with a prompt, the request itself hears in its own words
        generations = await unless_gone(request.receive, answer.whole())
        if refusal is not None:
            raise refusal
        if body.wants_prompt_only:
            generations = [without_answer(one) for one in generations]
    num_each = len(generations) // len(prompts)
    choices: list[CompletionChoice] = []
    later: Later = []
    for echo in echoes:
        answers = generations[len(choices) : len(choices) + num_each]
        choices += _choices(body, len(choices), answers, echo, later)
    return json_answer(chunks.chunk(choices, answer.usage(generations)), later)


def _choices(
    body: CompletionRequest, first: int, answers: Sequence[Generation], echo: Echo | None, later: Later
) -> list[CompletionChoice]:
    """All answers to one prompt, from index `first` on. What they tell of the prompt is made once."""
    text = "" if echo is None else echo.text
    rows = answers[0].prompt_logprobs or ()  # may come once, with the first
    of_prompt = tee(prompt_logprobs(rows, body.prompt_logprobs or 0), len(answers))
    before: list[list[Columns]] = [[]] * len(answers)
    if echo is not None and body.logprobs is not None:
        before = [[one] for one in copies(echo.columns(rows, body.logprobs), len(answers))]
    choices = []
    for place, one in enumerate(answers):
        logprobs = None
        if one.logprobs is not None:
            logprobs = later_completion_logprobs([*before[place], columns(one.logprobs, len(text))], later)
        if body.prompt_logprobs is not None:
            later.append(of_prompt[place])
        choices.append(
            CompletionChoice(
                first + place,
                text + one.text,
                logprobs,
                finish_reason(one),
                one.stop,
                one.token_ids if body.return_token_ids else msgspec.UNSET,
                given(answers[0].prompt_token_ids),
                msgspec.UNSET if body.prompt_logprobs is None else LATER,
            )
        )
    return choices


class _CompletionChunks(Chunks[CompletionChoice]):
    """A chunk of a completion has the shape of a whole one."""

    def __init__(self, answer: Answer, with_ids: bool) -> None:
        self._answer = answer
        self._with_ids = with_ids
        self._prompt_ids: dict[int, list[int]] = {}
        """Of each prompt."""
        self._num_characters: dict[int, int] = {}
        """That have begun in each answer, if log-probabilities tell where its tokens do."""

    def choice(
        self, index: int, text: str, token_ids: list[int], end: Generation | None, logprobs: Rows | None
    ) -> CompletionChoice:
        reason, stop = (None, None) if end is None else (finish_reason(end), end.stop)
        begins = self._with_ids and index not in self._num_characters
        of_prompt = self._prompt_ids.get(self._answer.prompt_of(index)) if begins else None
        offset = self._num_characters.get(index, 0)
        self._num_characters[index] = offset + num_begun(logprobs or ())
        shown = completion_logprobs(logprobs, offset)
        own_ids = token_ids if self._with_ids else msgspec.UNSET
        return CompletionChoice(index, text, shown, reason, stop, own_ids, given(of_prompt))

    def choices(self, index: int, piece: Piece) -> list[CompletionChoice]:
        if not (piece.text or piece.generation or piece.logprobs or (self._with_ids and piece.token_ids)):
            return []
        if piece.prompt_token_ids is not None:
            self._prompt_ids[self._answer.prompt_of(index)] = piece.prompt_token_ids
        return [self.choice(index, piece.text, piece.token_ids, piece.generation, piece.logprobs)]

    def is_plain(self, index: int, piece: Piece) -> bool:
        return bool(piece.text) and piece.generation is None and piece.logprobs is None and not self._with_ids

    def plain_choice(self, index: int, text: str) -> CompletionChoice:
        return CompletionChoice(index, text, None, None)

    def chunk(self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None) -> bytes:
        answer = self._answer
        return _encode(
            Completion(id=answer.id, created=answer.created, model=answer.model, choices=choices, usage=usage)
        )
