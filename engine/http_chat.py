"""POST /v1/chat/completions: a conversation's next turn, in OpenAI's shapes."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tercet.engine.http_answer import Answer
from tercet.engine.http_body import read_body
from tercet.engine.http_door import Door
from tercet.engine.http_errors import as_http
from tercet.engine.http_events import Chunks, events
from tercet.engine.openai_requests import ChatCompletionRequest
from tercet.engine.openai_responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    Usage,
    finish_reason,
)
from tercet.engine.sse import EventStream, unless_gone
from tercet.ipc.client import Generation, Piece

_encode = msgspec.json.Encoder().encode


async def chat(request: Request, door: Door) -> Any:
    """The route."""
    body = await read_body(request, ChatCompletionRequest)
    body.check()
    door.check_model(body.model)
    answer = Answer(request, door, "chatcmpl", [body.to_prompt()], body.to_params(), body)
    with_ids = bool(body.return_token_ids)
    with as_http("messages"):
        if body.stream:
            pieces = await unless_gone(request.receive, answer.begin())
            return EventStream(events(pieces, _ChatChunks(answer, with_ids), answer, body.wants_usage_chunk))
        generations = await unless_gone(request.receive, answer.whole())
    choices = [_choice(index, one, with_ids) for index, one in enumerate(generations)]
    completion = ChatCompletion(
        id=answer.id, created=answer.created, model=answer.model, choices=choices, usage=answer.usage(generations)
    )
    return Response(_encode(completion), media_type="application/json")


def _choice(index: int, generation: Generation, with_ids: bool) -> ChatChoice:
    token_ids = generation.token_ids if with_ids else msgspec.UNSET
    message = AssistantMessage("assistant", generation.text)
    return ChatChoice(index, message, None, finish_reason(generation), token_ids)


class _ChatChunks(Chunks[ChatChunkChoice]):
    """Pieces of chat answers as chunks; remembers which answers have begun."""

    def __init__(self, answer: Answer, with_ids: bool) -> None:
        self._answer = answer
        self._with_ids = with_ids
        self._begun: set[int] = set()

    def choices(self, index: int, piece: Piece) -> list[ChatChunkChoice]:
        choices = []
        if index not in self._begun:
            self._begun.add(index)
            choices.append(ChatChunkChoice(index, ChatDelta(role="assistant", content=""), None, None))
        token_ids = piece.token_ids if self._with_ids else msgspec.UNSET
        if piece.text or (self._with_ids and piece.token_ids):
            choices.append(ChatChunkChoice(index, ChatDelta(content=piece.text), None, None, token_ids))
        if piece.generation is not None:
            choices.append(ChatChunkChoice(index, ChatDelta(), None, finish_reason(piece.generation)))
        return choices

    def chunk(self, choices: list[ChatChunkChoice], usage: Usage | msgspec.UnsetType | None) -> bytes:
        answer = self._answer
        return _encode(
            ChatChunk(id=answer.id, created=answer.created, model=answer.model, choices=choices, usage=usage)
        )
