"""POST /v1/messages and /v1/messages/count_tokens: a conversation's next turn, in Anthropic's shapes."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from tercet.engine.anthropic_answers import (
    BlockEvent,
    BlockOut,
    MessageDelta,
    MessageOut,
    MessagesError,
    MessagesEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    StopReason,
    TokenCount,
    ending,
    message_usage,
)
from tercet.engine.anthropic_blocks import Blocks, content_of
from tercet.engine.anthropic_chat import to_chat
from tercet.engine.anthropic_errors import in_anthropics_form
from tercet.engine.anthropic_requests import CountRequest, MessagesRequest
from tercet.engine.chat_reader import ChatReader
from tercet.engine.http_answer import Answer
from tercet.engine.http_body import read_body
from tercet.engine.http_door import Door
from tercet.engine.http_errors import ApiError, as_http
from tercet.engine.http_presence import unless_gone
from tercet.engine.http_stream import json_answer
from tercet.engine.http_turn import turn_of
from tercet.engine.openapi import RouteTypes
from tercet.engine.sse import EventStream
from tercet.engine.typed_events import Teller, typed_events
from tercet.ipc.client import Generation, Piece

_encode = msgspec.json.Encoder().encode


async def messages(request: Request, door: Door) -> Any:
    """The route."""
    body = await read_body(request, MessagesRequest)
    door.check_model(body.model)
    asked = to_chat(body)
    asked.check()
    turn = await turn_of(asked, door)
    answer = Answer(request, door, "msg_", [turn.messages], turn.params, asked, turn.options)
    blocks = Blocks(answer.id, omits_thoughts=body.thinking is not None and body.thinking.display == "omitted")
    message = _Message(answer, turn.reader(), blocks, request.state.record.request_id)
    if body.stream:
        return EventStream(typed_events(answer, message, asked.names))
    with as_http(asked.names):
        (generation,) = await unless_gone(request.receive, answer.whole())
    return json_answer(_encode(message.whole(generation)))


async def count_tokens(request: Request, door: Door) -> Any:
    """The other route. A prompt is counted whatever may be answered to it."""
    body = await read_body(request, CountRequest)
    door.check_model(body.model)
    asked = to_chat(body)
    turns = await door.images.got(asked.to_prompt())
    with as_http(asked.names):
        counting = door.client.tokenize(turns, options=asked.to_options())
        tokens = await unless_gone(request.receive, counting)
    return json_answer(_encode(TokenCount(len(tokens))))


class _Message(Teller):
    """One answer in the making."""

    def __init__(self, answer: Answer, reader: ChatReader, blocks: Blocks, request_id: str) -> None:
        self._request_id = request_id
        self._answer = answer
        self._reader = reader
        self._blocks = blocks

    def whole(self, generation: Generation) -> MessageOut:
        content = content_of(self._said(generation.text, generation.token_ids, is_last=True))
        end = ending(generation, self._blocks.num_calls)
        usage = message_usage(self._answer.usage([generation]))
        return self._as_body(content, end.stop_reason, end.stop_sequence, usage)

    def begin(self, piece: Piece) -> list[MessagesEvent]:
        """Of its prompt nobody knows yet what had been computed before."""
        usage = MessageUsage(input_tokens=len(piece.prompt_token_ids or ()), output_tokens=0)
        return [MessageStart(self._as_body([], None, None, usage))]

    async def go_on(self, piece: Piece) -> list[MessagesEvent]:
        said = self._said(piece.text, piece.token_ids, is_last=piece.generation is not None)
        told: list[MessagesEvent] = [*said]
        if piece.generation is not None:
            usage = message_usage(self._answer.usage([piece.generation]))
            told += [MessageDelta(ending(piece.generation, self._blocks.num_calls), usage), MessageStop()]
        return told

    def fail(self, error: ApiError) -> MessagesEvent:
        return in_anthropics_form(error, self._request_id)

    def _said(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> Iterator[BlockEvent]:
        for delta in self._reader.feed(text, token_ids):
            yield from self._blocks.add(delta)
        if is_last:
            for delta in self._reader.finish():
                yield from self._blocks.add(delta)
            yield from self._blocks.end()

    def _as_body(
        self, content: list[BlockOut], stop_reason: StopReason | None, stop_sequence: str | None, usage: MessageUsage
    ) -> MessageOut:
        return MessageOut(
            id=self._answer.id,
            model=self._answer.model,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=usage,
        )


MESSAGES_ROUTES = [
    (
        RouteTypes(
            "POST",
            "/v1/messages",
            "The next turn, for Anthropic's clients",
            MessagesRequest,
            MessageOut,
            MessagesEvent,
            MessagesError,
        ),
        messages,
    ),
    (
        RouteTypes(
            "POST",
            "/v1/messages/count_tokens",
            "The length of its prompt",
            CountRequest,
            TokenCount,
            fails=MessagesError,
        ),
        count_tokens,
    ),
]
