"""What a client has asked that is no request: each question has one answer, and is asked again on a new connection.

It knows no socket: `send` is the client's.
"""

import asyncio
from collections.abc import Callable

import anyio

from tercet.ipc.answers import Detokenized, EngineInfo, Failed, Tokenized
from tercet.ipc.call import unpack_ids
from tercet.ipc.change_messages import Change, Changed
from tercet.ipc.errors import ClientError, EngineDied, error_of
from tercet.ipc.messages import Continuation, Detokenize, GenerateIds, Hello, Question, Tokenize

Answer = Tokenized | Detokenized | Changed
_DEADLINE_S = 60.0


class Questions:
    """The open questions of one client."""

    def __init__(self, send: Callable[[Question | Change | Hello], None]) -> None:
        self._send = send
        self._info: asyncio.Future[EngineInfo] | None = None
        self._open: dict[str, tuple[Question | Change, asyncio.Future[Answer]]] = {}

    async def tokenize(self, name: str, request: Continuation) -> list[int]:
        """Raises `ClientError`, as all questions do."""
        if isinstance(request, GenerateIds):
            raise ValueError("got a prompt of token ids; want a str or ChatMessages")
        answer = await self._ask(Tokenize(name, request))
        assert isinstance(answer, Tokenized)
        return unpack_ids(answer.token_ids)

    async def detokenize(self, name: str, token_ids: bytes) -> str:
        answer = await self._ask(Detokenize(name, token_ids))
        assert isinstance(answer, Detokenized)
        return answer.text

    async def change(self, change: Change) -> None:
        """It takes as long as what runs, and the workers' start: only an engine that is gone ends the wait."""
        await self._ask(change, None)

    def __len__(self) -> int:
        return len(self._open)

    async def _ask(self, question: Question | Change, within: float | None = _DEADLINE_S) -> Answer:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open[question.request_id] = question, answer
        try:
            self._send(question)
            with anyio.fail_after(within):
                return await answer
        except TimeoutError:
            raise EngineDied("no_answer", f"the engine has not answered within {within:g} s") from None
        finally:
            self._open.pop(question.request_id, None)

    async def info(self, within: float) -> EngineInfo | None:
        """What the engine says of itself, to all who ask meanwhile; None if it says nothing for so many seconds."""
        if self._info is None:
            self._info = asyncio.get_running_loop().create_future()
            self._send(Hello())
        try:
            with anyio.fail_after(within):
                return await asyncio.shield(self._info)
        except TimeoutError:
            self._info = None
            return None

    def ask_again(self) -> None:
        """The connection is a new one. Who is there is asked in any case: it may be another engine."""
        self._send(Hello())
        for question, _ in self._open.values():
            self._send(question)

    def take(self, message: Answer) -> None:
        """An answer has come; perhaps to somebody who no longer waits."""
        _, answer = self._open.get(message.request_id, (None, None))
        if answer is not None and not answer.done():
            answer.set_result(message)

    def inform(self, info: EngineInfo) -> None:
        """Asked for, or a pong."""
        if self._info is not None and not self._info.done():
            self._info.set_result(info)
        self._info = None

    def fail(self, failed: Failed) -> bool:
        """Whether a question, and not a request, has failed."""
        _, answer = self._open.get(failed.request_id, (None, None))
        if answer is not None and not answer.done():
            answer.set_exception(error_of(failed))
        return answer is not None

    def lose(self, error: ClientError) -> None:
        """No answer will come any more."""
        for _, answer in self._open.values():
            if not answer.done():
                answer.set_exception(error)

    def end(self, error: ClientError) -> None:
        """Nor does anybody say any more who is there."""
        if self._info is not None and not self._info.done():
            self._info.set_exception(error)
            self._info.exception()  # whoever asked may have left
        self._info = None
