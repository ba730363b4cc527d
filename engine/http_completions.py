"""POST /v1/completions: continuations of plain prompts, in OpenAI's shapes."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tercet.engine.http_answer import Answer
from tercet.engine.http_body import read_body
from tercet.engine.http_door import Door
from tercet.engine.http_errors import as_http
from tercet.engine.http_events import Chunks, events
from tercet.engine.openai_logprobs import Rows, completion_logprobs
from tercet.engine.openai_requests import CompletionRequest
from tercet.engine.openai_responses import Completion, CompletionChoice, Usage, finish_reason
from tercet.engine.sse import EventStream, unless_gone
from tercet.ipc.client import Generation, Piece

_encode = msgspec.json.Encoder().encode


async def complete(request: Request, door: Door) -> Any:
    """The route."""
    body = await read_body(request, CompletionRequest)
    body.check()
    door.check_model(body.model)
    answer = Answer(request, door, "cmpl", body.to_prompts(), body.to_params(), body)
    chunks = _CompletionChunks(answer, bool(body.return_token_ids))
    with as_http("prompt"):
        if body.stream:
            pieces = await unless_gone(request.receive, answer.begin())
            return EventStream(events(pieces, chunks, answer, body.wants_usage_chunk))
        generations = await unless_gone(request.receive, answer.whole())
    choices = [
        chunks.choice(index, one.text, one.token_ids, one, one.logprobs) for index, one in enumerate(generations)
    ]
    return Response(chunks.chunk(choices, answer.usage(generations)), media_type="application/json")


class _CompletionChunks(Chunks[CompletionChoice]):
    """A chunk of a completion has the shape of a whole one."""

    def __init__(self, answer: Answer, with_ids: bool) -> None:
        self._answer = answer
        self._with_ids = with_ids
        self._num_characters: dict[int, int] = {}

    def choice(
        self, index: int, text: str, token_ids: list[int], end: Generation | None, logprobs: Rows | None
    ) -> CompletionChoice:
        reason, stop = (None, None) if end is None else (finish_reason(end), end.stop)
        offset = self._num_characters.get(index, 0)
        self._num_characters[index] = offset + len(text)
        shown = completion_logprobs(logprobs, offset)
        return CompletionChoice(index, text, shown, reason, stop, token_ids if self._with_ids else msgspec.UNSET)

    def choices(self, index: int, piece: Piece) -> list[CompletionChoice]:
        if not (piece.text or piece.generation or piece.logprobs or (self._with_ids and piece.token_ids)):
            return []
        return [self.choice(index, piece.text, piece.token_ids, piece.generation, piece.logprobs)]

    def chunk(self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None) -> bytes:
        answer = self._answer
        return _encode(
            Completion(id=answer.id, created=answer.created, model=answer.model, choices=choices, usage=usage)
        )
