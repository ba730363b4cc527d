"""The tokenizer process at work: sockets on both sides, the desk between them.

What is decided is in `front_desk.py`, `reception.py`, `request_check.py` and `change_line.py`; this shell moves
messages.
"""

import asyncio
import contextlib
import time
from functools import partial
from itertools import count

import anyio
import anyio.abc
import msgspec

from tercet.engine.adapter_line import AdapterLine, failure_of
from tercet.engine.aside import Aside
from tercet.engine.change_line import NOT_ALLOWED, ChangeLine, Held
from tercet.engine.child import SupervisorLink
from tercet.engine.front_desk import FrontDesk
from tercet.engine.last_words import Owed
from tercet.engine.live import Client, Live
from tercet.engine.preparation import Prepared
from tercet.engine.quick_requests import has_images, weight_of
from tercet.engine.reception import MAX_LIVE_REQUESTS, Reception
from tercet.engine.refusal import RETRY_AFTER_S, SHUTTING_DOWN, TAKES_NO_MORE, Refusal
from tercet.engine.request_check import goes_on, received_of
from tercet.engine.schedulers import Schedulers
from tercet.ipc.answers import Batch, Failed, Rejected, ToClient
from tercet.ipc.change_messages import Change
from tercet.ipc.front_door import Delivery, FrontDoor
from tercet.ipc.messages import Cancel, Detokenize, Hello, Question, Request, Tokenize
from tercet.ipc.process_messages import (
    Abandon,
    Drain,
    Limits,
    NewLimits,
    Outcome,
    Serving,
    Standing,
    ToChild,
)
from tercet.ipc.sockets import AsyncInbox
from tercet.ipc.step_messages import Load, ToTokenizer

_TICK_S = 0.25
_SETTLE_S = 0.1
"""From a connection's end until its socket surely knows."""
_HEARD_AT_ONCE = 8
"""New requests may keep running ones waiting for so many of them."""
_RETURN_S = 2.0
"""From a successor's beginning until the clients of its predecessor are back with what that had begun."""
NUMBER_BITS = 40
"""More requests than one incarnation of this process will see: those of two have different numbers."""


class Tokenizer:
    """The running process: sockets on both sides, the desk between them."""

    def __init__(
        self,
        door: FrontDoor,
        schedulers: Schedulers,
        desk: FrontDesk,
        reception: Reception,
        aside: Aside,
        link: SupervisorLink,
    ) -> None:
        self._door = door
        self._schedulers = schedulers
        self._desk = desk
        self._reception = reception
        self._aside = aside
        self._link = link
        self._encoder = msgspec.msgpack.Encoder()
        self._done = anyio.Event()
        self._owed = Owed(MAX_LIVE_REQUESTS)
        numbers = count(desk.next_number)  # no tokenizer before has given such
        adapters = AdapterLine(desk, link.spec.config, numbers, link.tell, self._post)
        self._changes = ChangeLine(desk, adapters, numbers, link.tell, self._post, self._abort_all, self._submit_held)

    async def serve(self, inbox: AsyncInbox[ToTokenizer], limits: Limits) -> None:
        """Until drained or abandoned."""
        empty = Load(0, 0, limits.num_pages - 1, limits.num_pages, 0, 0, 0, 0)  # until the schedulers say
        self._desk.loads = [empty] * len(self._desk.loads)
        if self._link.spec.incarnation:  # there may be requests of a tokenizer that died
            self._schedulers.forget(self._desk.next_number)
        self._changes.stand(self._reception.standing)
        loop = asyncio.get_running_loop()
        self._settled_at = loop.time() + (_RETURN_S if self._link.spec.incarnation else 0.0)
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            loop.call_at(self._settled_at, self._changes.settle)
            for work in (self._serve_clients, self._notice_departures, self._tick):
                tasks.start_soon(work)
            tasks.start_soon(self._schedulers.follow)
            tasks.start_soon(inbox.deliver, self._speak)
            self._link.subscribe(partial(self._obey_soon, loop))
            self._link.tell(Serving())
            await self._done.wait()
            tasks.cancel_scope.cancel()
        self._schedulers.close()

    # --------------------------------------------------------------------------------- from clients

    async def _serve_clients(self) -> None:
        await self._door.deliver(self._hear_all, _HEARD_AT_ONCE)

    def _hear_all(self, messages: list[list[bytes]]) -> None:
        for client, *frames in messages:
            self._hear(client, frames)

    def _hear(self, client: Client, frames: list[bytes]) -> None:
        match self._reception.decode(frames):
            case Rejected() as rejected:
                self._post(client, rejected)
            case Hello():
                self._post(client, self._reception.info())
            case Cancel(request_id=request_id):
                lives, ends = self._desk.cancel(client, request_id, time.monotonic())
                if ends:
                    self._schedulers.abort(lives)
                    self._post(client, Batch(tuple(ends)))
                    self._note_ends()
            case Tokenize() | Detokenize() as question:
                self._answer(client, question, weight_of(question, len(frames[0])))
            case message if isinstance(message, Change):
                self._change(client, message)
            case request:
                self._admit(client, request, weight_of(request, len(frames[0])))

    def _answer(self, client: Client, question: Question, num_bytes: int) -> None:
        try:
            if self._reception.is_quick(question):
                self._post(client, self._reception.answer(question))
            else:
                self._aside.enter(num_bytes)
                self._tasks.start_soon(self._answer_aside, client, question, num_bytes)
        except Refusal as refusal:
            self._post(client, Failed(question.request_id, refusal.code, str(refusal), refusal.retry_after))

    async def _answer_aside(self, client: Client, question: Question, num_bytes: int) -> None:
        self._post(client, await self._aside.run(num_bytes, has_images(question), self._reception.answer, question))

    def _admit(self, client: Client, request: Request, num_bytes: int) -> None:
        live = self._reception.admit(client, request, self._changes.refusal)
        if not isinstance(live, Live):
            self._post(client, live)
            return
        if request.handling.timeout is not None:
            self._desk.give_time(live, request.handling.timeout, time.monotonic())
        try:
            if self._reception.is_quick(request):
                self._submit(live, request, self._reception.prepare(live, request))
            else:
                self._aside.enter(num_bytes, is_known=goes_on(received_of(request), request.params.n))
                self._tasks.start_soon(self._prepare_aside, live, request, num_bytes)
        except Refusal as refusal:
            self._refuse(live, refusal)

    async def _prepare_aside(self, live: Live, request: Request, num_bytes: int) -> None:
        try:
            prepared = await self._aside.run(num_bytes, has_images(request), self._prepare_if_wanted, live, request)
            if prepared is not None and self._desk.is_live(live):
                self._submit(live, request, prepared)
        except Refusal as refusal:
            if self._desk.is_live(live):
                self._refuse(live, refusal)

    def _prepare_if_wanted(self, live: Live, request: Request) -> Prepared | None:
        """In a thread, where long requests take turns: those that were cancelled meanwhile hold nobody up."""
        return self._reception.prepare(live, request) if live.asked.answers else None

    def _submit(self, live: Live, request: Request, prepared: Prepared) -> None:
        if self._changes.holds and not goes_on(prepared.received, request.params.n):
            self._changes.hold(Held(live, request, prepared), time.monotonic())
            return
        self._changes.adapters.check(prepared.sampling)
        submit = self._reception.submit(live, request, prepared, time.monotonic())
        if not self._schedulers.submit(live.asked, submit):
            raise Refusal("overloaded", "the scheduler is far behind; ask again later", RETRY_AFTER_S)

    def _submit_held(self, held: Held) -> None:
        try:
            self._submit(held.live, held.request, held.prepared)
        except Refusal as refusal:
            self._refuse(held.live, refusal)

    def _refuse(self, live: Live, refusal: Refusal) -> None:
        self._post(live.client, self._desk.fail(live, refusal.code, str(refusal), refusal.retry_after))
        self._note_ends()

    def _change(self, client: Client, change: Change) -> None:
        if not self._link.spec.config.allow_changes:
            self._post(client, failure_of(change, "not_allowed", NOT_ALLOWED))
        elif self._reception.draining:
            self._post(client, failure_of(change, "draining", TAKES_NO_MORE))
        else:
            self._changes.ask(client, change)
            self._reception.name_adapters(self._changes.adapters.known)

    # ------------------------------------------------------------------------------- from the scheduler

    def _speak(self, messages: list[ToTokenizer]) -> None:
        items, aborts = self._desk.accept(messages, time.monotonic())
        self._schedulers.abort(aborts)
        for client, news in items.items():
            self._post(client, Batch(tuple(news)))
        self._note_ends()

    # ------------------------------------------------------------------------------------ to both sides

    def _post(self, client: Client, message: ToClient) -> None:
        delivery = self._door.send(client, self._encoder.encode(message))
        if delivery is Delivery.SENT:
            return
        lost = self._desk.drop_client(client)
        self._schedulers.abort(lost)
        if delivery is Delivery.FULL:
            self._owed.note(client, message, lost)
        self._note_ends()

    def _pay(self, client: Client, owed: Batch) -> bool:
        return self._door.send(client, self._encoder.encode(owed)) is not Delivery.FULL

    def _abort_all(self, why: str) -> None:
        self._schedulers.forget(self._desk.next_number)
        self._end_all("aborted", why)

    def _end_all(self, code: str, why: str) -> None:
        for client, items in self._desk.fail_all(code, why).items():
            self._post(client, Batch(tuple(items)))

    # ------------------------------------------------------------------------------------------- time

    async def _notice_departures(self) -> None:
        """ZeroMQ tells that some connection has ended but not whose: an empty batch finds out."""
        while True:
            await self._door.departure()
            await anyio.sleep(_SETTLE_S)
            for client in self._desk.clients():
                self._post(client, Batch(()))

    async def _tick(self) -> None:
        count = 0
        while True:
            self._link.beat(count)
            count += 1
            self._schedulers.abort([])
            for lives, failed in self._desk.expire(time.monotonic()):
                self._schedulers.abort(lives)
                self._post(lives[0].client, failed)
                self._note_ends()
            self._owed.pay(self._pay)
            await anyio.sleep(min(_TICK_S, self._link.beat_seconds))

    # ---------------------------------------------------------------------------------------- the end

    def _obey_soon(self, loop: asyncio.AbstractEventLoop, command: ToChild) -> None:
        """Called in the link's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, so there is nobody to obey
            loop.call_soon_threadsafe(self._obey, command)

    def _obey(self, command: ToChild) -> None:
        match command:
            case Drain():
                # What a predecessor had begun is no newcomer.
                asyncio.get_running_loop().call_at(self._settled_at, self._drain)
            case Abandon(message=message, code=code):
                self._changes.end(code, message)
                self._end_all(code, message)
                self._done.set()
            case Standing():
                self._changes.stand(command)
                self._reception.standing = command
                self._reception.name_adapters(self._changes.adapters.known)
                self._note_ends()
            case Outcome():
                self._changes.hear(command)
                self._reception.name_adapters(self._changes.adapters.known)
            case NewLimits(limits=limits):
                self._reception.measure_by(limits)
            case _:
                self._schedulers.obey(command)

    def _drain(self) -> None:
        self._reception.draining = True
        self._changes.drain()
        self._note_ends()

    def _note_ends(self) -> None:
        """Whatever waits for requests to end goes on if they have."""
        self._changes.go_on()
        if self._reception.draining:
            if self._changes.is_asleep and self._desk.num_live:  # they wait for workers in vain
                self._end_all("draining", SHUTTING_DOWN)
            if self._desk.num_live == 0:
                self._changes.end()
                self._done.set()
