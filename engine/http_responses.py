"""POST /v1/responses: a conversation's next turn, in the shapes of OpenAI's Responses API. No answer is kept."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from tercet.engine.http_answer import Answer
from tercet.engine.http_body import read_body
from tercet.engine.http_door import Door
from tercet.engine.http_errors import ApiError, as_http
from tercet.engine.http_presence import unless_gone
from tercet.engine.http_stream import json_answer
from tercet.engine.http_tools import marks_of
from tercet.engine.http_turn import Turn, turn_of
from tercet.engine.openai_answers import PromptTokensDetails
from tercet.engine.openai_logprobs import Later, Rows
from tercet.engine.responses_answers import (
    Completed,
    Created,
    Event,
    Failed,
    Failure,
    Incomplete,
    IncompleteDetails,
    InProgress,
    InputDetails,
    OutputDetails,
    ReasoningItem,
    Response,
    ResponsesUsage,
)
from tercet.engine.responses_output import Output
from tercet.engine.responses_requests import Reasoning, ResponsesRequest, TextConfig, TextFormat
from tercet.engine.said_rows import SaidRows
from tercet.engine.sse import EventStream
from tercet.engine.typed_events import Teller, typed_events
from tercet.ipc.client import ClientError, Generation, Piece

_encode = msgspec.json.Encoder().encode
_PLAIN_TEXT = TextFormat(type="text")


async def respond(request: Request, door: Door) -> Any:
    """The route."""
    body = await read_body(request, ResponsesRequest)
    body.check()
    door.check_model(body.model)
    chat = body.to_chat()
    turn = await turn_of(chat, door)
    if turn.reasoning != "none":  # to count thoughts; asked ahead: in a drain, the tokenizer ends with the last answer
        with as_http(chat.names):
            turn = turn._replace(marks=await marks_of(door))
    answer = Answer(request, door, "resp_", [turn.messages], turn.params, chat, turn.options)
    if body.stream:
        return EventStream(typed_events(answer, _Response(body, door, turn, answer), chat.names))
    later: Later = []
    response = _Response(body, door, turn, answer, later)
    with as_http(chat.names):
        (generation,) = await unless_gone(request.receive, answer.whole())
        return json_answer(_encode(await response.whole(generation)), later)


class _Response(Teller):
    """One answer, whole or as it comes."""

    def __init__(
        self, body: ResponsesRequest, door: Door, turn: Turn, answer: Answer, later: Later | None = None
    ) -> None:
        """`later`: see `Output`."""
        self._door = door
        self._answer = answer
        self._reader = turn.reader()
        self._output = Output(later)
        self._said = SaidRows() if body.wants_logprobs else None
        self._token_ids: list[int] = []
        text = body.text or TextConfig()
        self._begun = Response(
            id=answer.id,
            created_at=answer.created,
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=answer.model,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            prompt_cache_key=body.prompt_cache_key,
            reasoning=body.reasoning or Reasoning(),
            safety_identifier=body.safety_identifier,
            temperature=body.temperature,
            text=msgspec.structs.replace(text, format=text.format or _PLAIN_TEXT),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=body.top_p,
            user=body.user,
        )

    async def whole(self, generation: Generation) -> Response:
        for _ in self._read(generation.text, generation.token_ids, generation.logprobs, generation):
            pass
        return await self._ended(generation, generation.token_ids)

    def begin(self, piece: Piece) -> Iterator[Event]:
        for kind in (Created, InProgress):
            yield kind(sequence_number=self._output.next_number(), response=self._begun)

    async def go_on(self, piece: Piece) -> list[Event]:
        self._token_ids += piece.token_ids
        told = list(self._read(piece.text, piece.token_ids, piece.logprobs, piece.generation))
        if piece.generation is not None:
            response = await self._ended(piece.generation, self._token_ids)
            kind = Completed if response.status == "completed" else Incomplete
            told.append(kind(sequence_number=self._output.next_number(), response=response))
        return told

    def fail(self, error: ApiError) -> Event:
        failure = Failure("server_error", error.reply.error.message)
        response = msgspec.structs.replace(self._begun, status="failed", error=failure, output=self._output.items)
        return Failed(sequence_number=self._output.next_number(), response=response)

    def _read(self, text: str, token_ids: Sequence[int], rows: Rows | None, end: Generation | None) -> Iterator[Event]:
        told = self._reader.read(text, token_ids)
        if end is not None:
            told += self._reader.read_rest()
        if self._said is not None:
            self._said.feed(text, rows or ())
        for delta, span in told:
            said: Rows = []
            if self._said is not None:
                text = delta.reasoning_content or delta.content or ""
                said = self._said.take(text) if span is None else self._said.take_at(*span)
            yield from self._output.add(delta, said)
        if end is not None:
            yield from self._output.finish("incomplete" if end.reason == "length" else "completed")

    async def _ended(self, generation: Generation, token_ids: Sequence[int]) -> Response:
        usage = self._answer.usage([generation])
        assert isinstance(usage.prompt_tokens_details, PromptTokensDetails)
        is_cut = generation.reason == "length"
        return msgspec.structs.replace(
            self._begun,
            status="incomplete" if is_cut else "completed",
            completed_at=None if is_cut else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            output=self._output.items,
            usage=ResponsesUsage(
                usage.prompt_tokens,
                InputDetails(usage.prompt_tokens_details.cached_tokens),
                usage.completion_tokens,
                OutputDetails(await self._num_thought(token_ids)),
                usage.total_tokens,
            ),
        )

    async def _num_thought(self, token_ids: Sequence[int]) -> int:
        """How many tokens are the model's reasoning, with the marks around it."""
        thoughts = [item for item in self._output.items if isinstance(item, ReasoningItem)]
        if not thoughts:
            return 0
        known = self._reader.num_thought(token_ids)
        if known is not None:
            return known
        # Spelled, it may share tokens with its neighbours. What the tokenizer adds is there both times.
        thought = "".join(part.text for item in thoughts for part in item.content)
        tokenize = self._door.client.tokenize
        with contextlib.suppress(ClientError):
            return len(await tokenize(thought * 2)) - len(await tokenize(thought))
        return 0  # the tokenizer has ended, and the answer is worth more than this number
