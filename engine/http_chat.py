"""POST /v1/chat/completions: a conversation's next turn, in OpenAI's shapes."""

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request

from tercet.engine.chat_reader import ChatReader
from tercet.engine.http_answer import Answer
from tercet.engine.http_body import read_body
from tercet.engine.http_door import Door
from tercet.engine.http_errors import as_http
from tercet.engine.http_events import Chunks, events
from tercet.engine.http_presence import unless_gone
from tercet.engine.http_stream import json_answer
from tercet.engine.http_turn import turn_of
from tercet.engine.json_parts import LATER
from tercet.engine.openai_answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    FinishReason,
    Usage,
    finish_reason,
    given,
)
from tercet.engine.openai_logprobs import Later, chat_logprobs, later_chat_logprobs, prompt_logprobs
from tercet.engine.openai_requests import ChatCompletionRequest
from tercet.engine.sse import EventStream
from tercet.ipc.client import Generation, Piece

_encode = msgspec.json.Encoder().encode


async def chat(request: Request, door: Door) -> Any:
    """The route."""
    body = await read_body(request, ChatCompletionRequest)
    body.check()
    door.check_model(body.model)
    turn = await turn_of(body, door)
    answer = Answer(request, door, "chatcmpl-", [turn.messages], turn.params, body, turn.options)
    with_ids = bool(body.return_token_ids)
    if body.stream:
        chunks = _ChatChunks(answer, turn.reader, with_ids)
        return EventStream(events(answer.pieces(), chunks, answer, body.wants_usage, body.names))
    with as_http(body.names):
        generations = await unless_gone(request.receive, answer.whole())
    later: Later = []
    choices = [_choice(index, one, turn.reader(), with_ids, later) for index, one in enumerate(generations)]
    if (of_prompt := generations[0].prompt_logprobs) is not None:
        later.append(prompt_logprobs(of_prompt, body.prompt_logprobs or 0))
    completion = ChatCompletion(
        id=answer.id,
        created=answer.created,
        model=answer.model,
        choices=choices,
        usage=answer.usage(generations),
        prompt_token_ids=given(generations[0].prompt_token_ids),
        prompt_logprobs=msgspec.UNSET if of_prompt is None else LATER,
    )
    return json_answer(_encode(completion), later)


def _reason(generation: Generation, num_calls: int) -> FinishReason:
    reason = finish_reason(generation)
    return "tool_calls" if num_calls and reason == "stop" else reason


def _choice(index: int, generation: Generation, reader: ChatReader, with_ids: bool, later: Later) -> ChatChoice:
    deltas = [*reader.feed(generation.text, generation.token_ids), *reader.finish()]
    content = "".join(delta.content for delta in deltas if delta.content is not None)
    reasoning = "".join(delta.reasoning_content for delta in deltas if delta.reasoning_content is not None)
    calls = [msgspec.structs.replace(call, index=msgspec.UNSET) for delta in deltas for call in delta.tool_calls or ()]
    message = AssistantMessage(
        content=content if content or not calls else None,
        reasoning_content=reasoning or msgspec.UNSET,
        tool_calls=calls or msgspec.UNSET,
    )
    token_ids = generation.token_ids if with_ids else msgspec.UNSET
    logprobs = later_chat_logprobs(generation.logprobs, later)
    return ChatChoice(index, message, logprobs, _reason(generation, len(calls)), generation.stop, token_ids)


class _ChatChunks(Chunks[ChatChunkChoice]):
    """Pieces of chat answers as chunks."""

    def __init__(self, answer: Answer, reader: Callable[[], ChatReader], with_ids: bool) -> None:
        self._answer = answer
        self._new_reader = reader
        self._with_ids = with_ids
        self._prompt_ids: list[int] | None = None
        self._readers: dict[int, ChatReader] = {}
        """Of the answers that have begun."""

    def choices(self, index: int, piece: Piece) -> list[ChatChunkChoice]:
        reader = self._readers.get(index)
        begins = reader is None
        self._prompt_ids = self._prompt_ids or piece.prompt_token_ids
        if reader is None:
            reader = self._readers[index] = self._new_reader()
        deltas = reader.feed(piece.text, piece.token_ids)
        if piece.generation is not None:
            deltas += reader.finish()
        if ((self._with_ids and piece.token_ids) or piece.logprobs) and not deltas:
            deltas.append(ChatDelta())
        choices = [ChatChunkChoice(index, delta, None, None) for delta in deltas]
        if piece.logprobs:
            choices[0] = msgspec.structs.replace(choices[0], logprobs=chat_logprobs(piece.logprobs))
        if self._with_ids and piece.token_ids:
            choices[0] = msgspec.structs.replace(choices[0], token_ids=piece.token_ids)
        if begins:  # before all that is told of tokens: a client may read a chunk's text beside its log-probabilities
            choices.insert(0, ChatChunkChoice(index, ChatDelta(role="assistant", content=""), None, None))
        if piece.generation is not None:
            reason = _reason(piece.generation, reader.num_calls)
            choices.append(ChatChunkChoice(index, ChatDelta(), None, reason, piece.generation.stop))
        return choices

    def is_plain(self, index: int, piece: Piece) -> bool:
        reader = self._readers.get(index)
        return (
            reader is not None
            and reader.is_plain
            and bool(piece.text)
            and piece.generation is None
            and not piece.logprobs
            and not self._with_ids
        )

    def plain_choice(self, index: int, text: str) -> ChatChunkChoice:
        return ChatChunkChoice(index, ChatDelta(content=text), None, None)

    def chunk(self, choices: list[ChatChunkChoice], usage: Usage | msgspec.UnsetType | None) -> bytes:
        answer = self._answer
        begins = bool(choices) and choices[0].delta.role is not None
        return _encode(
            ChatChunk(
                id=answer.id,
                created=answer.created,
                model=answer.model,
                choices=choices,
                prompt_token_ids=given(self._prompt_ids if begins else None),
                usage=usage,
            )
        )
