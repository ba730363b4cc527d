"""POST /v1/chat/completions and /v1/completions: requests to the engine, and its pieces as OpenAI's clients read them.

One HTTP request is one or several requests to the engine; their answers are told apart by `index`.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tercet.engine.http_door import Door
from tercet.engine.http_errors import ApiError, from_decoding, from_engine
from tercet.engine.openai_requests import ChatCompletionRequest, CompletionRequest
from tercet.engine.openai_responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    Completion,
    CompletionChoice,
    Usage,
    finish_reason,
    usage_of,
)
from tercet.engine.sse import DONE, EventStream, event, unless_gone
from tercet.ipc.client import ClientError, Generation, Piece, Prompt
from tercet.ipc.messages import SamplingParams

MAX_BODY_BYTES = 16 * 2**20
_BODY_SECONDS = 60.0
_T = TypeVar("_T")
Indexed = tuple[int, Piece]
_encode = msgspec.json.Encoder().encode


async def read_body(request: Request, kind: type[_T]) -> _T:
    """The body as `kind`, or the error that says why not."""
    return decode(await _bytes_of(request), kind)


def decode(body: bytes, kind: type[_T]) -> _T:
    """JSON as `kind`; what is wrong with it becomes an `ApiError` that names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise from_decoding(error) from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body cannot be read: {error}", code="invalid_json") from None


async def _bytes_of(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes", code="body_too_large")
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {_BODY_SECONDS:g} s", code="body_too_slow") from None
    return bytes(body)


class _Answer:
    """What all parts of the answer to one HTTP request have in common."""

    def __init__(
        self,
        door: Door,
        prefix: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        body: ChatCompletionRequest | CompletionRequest,
    ) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = door.info.model
        self._door = door
        self._prompts = prompts
        self._params = params
        self._handling: dict[str, Any] = {"cache_salt": body.cache_salt or "", "priority": body.priority or 0}

    async def whole(self) -> list[Generation]:
        """All answers, in the order of the prompts; if one fails, all are cancelled."""
        ask = self._door.client.generate
        tasks = [asyncio.ensure_future(ask(one, self._params, **self._handling)) for one in self._prompts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def pieces(self) -> AsyncGenerator[Indexed, None]:
        """The pieces of all answers as they come."""
        streams = [self._door.client.stream(one, self._params, **self._handling) for one in self._prompts]
        if len(streams) == 1:
            async with contextlib.aclosing(_generator(streams[0])) as only:
                async for piece in only:
                    yield 0, piece
            return
        merged: asyncio.Queue[Indexed | ClientError | None] = asyncio.Queue()
        tasks = [asyncio.ensure_future(_forward(index, stream, merged)) for index, stream in enumerate(streams)]
        try:
            running = len(tasks)
            while running:
                match await merged.get():
                    case None:
                        running -= 1
                    case ClientError() as error:
                        raise error
                    case indexed:
                        yield indexed
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(index: int, stream: AsyncIterator[Piece], to: "asyncio.Queue[Indexed | ClientError | None]") -> None:
    try:
        async with contextlib.aclosing(_generator(stream)) as pieces:
            async for piece in pieces:
                to.put_nowait((index, piece))
        to.put_nowait(None)
    except ClientError as error:
        to.put_nowait(error)


def _generator(stream: AsyncIterator[Piece]) -> AsyncGenerator[Piece, None]:
    """The client's streams are generators, and can be closed."""
    assert isinstance(stream, AsyncGenerator)
    return stream


async def _begun(pieces: AsyncGenerator[Indexed, None]) -> AsyncGenerator[Indexed, None]:
    """The same stream once its first piece is there: what is refused at once can still become a status."""
    first = await anext(pieces)

    async def rest() -> AsyncGenerator[Indexed, None]:
        async with contextlib.aclosing(pieces):
            yield first
            async for indexed in pieces:
                yield indexed

    return rest()


async def chat(request: Request, door: Door) -> Any:
    """POST /v1/chat/completions."""
    body = await read_body(request, ChatCompletionRequest)
    body.check()
    door.check_model(body.model)
    answer = _Answer(door, "chatcmpl", [body.to_prompt()], body.to_params(), body)
    ids = bool(body.return_token_ids)

    def chunk(choices: list[ChatChunkChoice], usage: Any) -> bytes:
        return _encode(
            ChatChunk(id=answer.id, created=answer.created, model=answer.model, choices=choices, usage=usage)
        )

    def on_piece(index: int, piece: Piece, is_first: bool) -> list[ChatChunkChoice]:
        choices = []
        if is_first:
            choices.append(ChatChunkChoice(index, ChatDelta(role="assistant", content=""), None, None))
        token_ids = piece.token_ids if ids else msgspec.UNSET
        if piece.text or (ids and piece.token_ids):
            choices.append(ChatChunkChoice(index, ChatDelta(content=piece.text), None, None, token_ids))
        if piece.generation is not None:
            choices.append(ChatChunkChoice(index, ChatDelta(), None, finish_reason(piece.generation)))
        return choices

    with _as_http("messages"):
        if body.stream:
            pieces = await unless_gone(request.receive, _begun(answer.pieces()))
            return EventStream(_events(pieces, on_piece, chunk, body.wants_usage_chunk))
        generations = await unless_gone(request.receive, answer.whole())
    choices = [
        ChatChoice(
            index,
            AssistantMessage("assistant", one.text),
            None,
            finish_reason(one),
            one.token_ids if ids else msgspec.UNSET,
        )
        for index, one in enumerate(generations)
    ]
    return _json(
        ChatCompletion(
            id=answer.id,
            created=answer.created,
            model=answer.model,
            choices=choices,
            usage=usage_of(generations),
        )
    )


async def complete(request: Request, door: Door) -> Any:
    """POST /v1/completions."""
    body = await read_body(request, CompletionRequest)
    body.check()
    door.check_model(body.model)
    answer = _Answer(door, "cmpl", body.to_prompts(), body.to_params(), body)
    ids = bool(body.return_token_ids)

    def completion(choices: list[CompletionChoice], usage: Any) -> bytes:
        return _encode(
            Completion(id=answer.id, created=answer.created, model=answer.model, choices=choices, usage=usage)
        )

    def on_piece(index: int, piece: Piece, is_first: bool) -> list[CompletionChoice]:
        end = piece.generation
        if not (piece.text or end or (ids and piece.token_ids)):
            return []
        reason, stop = (None, None) if end is None else (finish_reason(end), end.stop)
        token_ids = piece.token_ids if ids else msgspec.UNSET
        return [CompletionChoice(index, piece.text, None, reason, stop, token_ids)]

    with _as_http("prompt"):
        if body.stream:
            pieces = await unless_gone(request.receive, _begun(answer.pieces()))
            return EventStream(_events(pieces, on_piece, completion, body.wants_usage_chunk))
        generations = await unless_gone(request.receive, answer.whole())
    choices = [
        CompletionChoice(index, one.text, None, finish_reason(one), one.stop, one.token_ids if ids else msgspec.UNSET)
        for index, one in enumerate(generations)
    ]
    return Response(completion(choices, usage_of(generations)), media_type="application/json")


_Choice = TypeVar("_Choice", ChatChunkChoice, CompletionChoice)


async def _events(
    pieces: AsyncGenerator[Indexed, None],
    on_piece: Callable[[int, Piece, bool], list[_Choice]],
    chunk: Callable[[list[_Choice], Usage | msgspec.UnsetType | None], bytes],
    with_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """One event a choice; then usage if wanted; then the end. A failure on the way is an event as well."""
    begun: set[int] = set()
    ended: list[Generation] = []
    no_usage = None if with_usage else msgspec.UNSET
    async with contextlib.aclosing(pieces):
        try:
            async for index, piece in pieces:
                choices = on_piece(index, piece, index not in begun)
                begun.add(index)
                if piece.generation is not None:
                    ended.append(piece.generation)
                if choices:
                    yield b"".join([event(chunk([choice], no_usage)) for choice in choices])
            if with_usage:
                yield event(chunk([], usage_of(ended)))
        except ClientError as error:
            yield event(_encode(from_engine(error, "prompt").reply))
        yield DONE


@contextlib.contextmanager
def _as_http(prompt_field: str) -> Any:
    try:
        yield
    except ClientError as error:
        raise from_engine(error, prompt_field) from None


def _json(body: msgspec.Struct) -> Response:
    return Response(_encode(body), media_type="application/json")
