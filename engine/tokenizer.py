"""PROCESS tokenizer: text on the clients' side, token ids on the scheduler's.

It owns the connections of clients and the life of each request as its client sees it: exactly one terminal message,
whatever happens. It knows nothing of pages, slots or steps. What it decides is in `front_desk.py`, `reception.py` and
`request_check.py`; this shell moves messages.
"""

import asyncio
import contextlib
import time
from functools import partial
from pathlib import Path

import anyio
import anyio.abc
import msgspec
import zmq

from tercet.engine.aside import Aside
from tercet.engine.child import SupervisorLink, run
from tercet.engine.doors import Doors, bind_front_door
from tercet.engine.front_desk import FrontDesk
from tercet.engine.last_words import last_words
from tercet.engine.live import Client, Live
from tercet.engine.preparation import Prepared
from tercet.engine.reception import MAX_LIVE_REQUESTS, Reception
from tercet.engine.refusal import RETRY_AFTER_S, Refusal
from tercet.engine.request_check import goes_on, received_of
from tercet.engine.rules import make_rules
from tercet.engine.schedulers import Schedulers, make_schedulers
from tercet.engine.text_codec import load_codec
from tercet.engine.trace import Span, open_lanes, record_collections
from tercet.ipc.answers import Batch, Failed, Item, Rejected, ToClient
from tercet.ipc.front_door import Delivery, FrontDoor
from tercet.ipc.messages import Cancel, Detokenize, Hello, Question, Request, Tokenize
from tercet.ipc.process_messages import Abandon, Drain, Limits, Loaded, NewLimits, Serving, ToChild
from tercet.ipc.sockets import AsyncInbox
from tercet.ipc.step_messages import Load, ToTokenizer

_TICK_S = 0.25
_SETTLE_S = 0.1
"""From a connection's end until its socket surely knows."""
_HEARD_AT_ONCE = 8
"""New requests may keep running ones waiting for so many of them."""
_RETURN_S = 2.0
"""From a successor's beginning until the clients of its predecessor are back with what that had begun."""
_NUMBER_BITS = 40
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
        self._owed: dict[Client, list[Item]] = {}
        """The last words to clients that could not be sent any more."""

    async def serve(self, inbox: AsyncInbox[ToTokenizer], limits: Limits) -> None:
        """Until drained or abandoned."""
        empty = Load(0, 0, limits.num_pages - 1, limits.num_pages, 0, 0, 0, 0)  # until the schedulers say
        self._desk.loads = [empty] * len(self._desk.loads)
        if self._link.spec.incarnation:  # there may be requests of a tokenizer that died
            self._schedulers.forget(self._desk.next_number)
        loop = asyncio.get_running_loop()
        self._settled_at = loop.time() + (_RETURN_S if self._link.spec.incarnation else 0.0)
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
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
                    self._end_if_drained()
            case Tokenize() | Detokenize() as question:
                self._answer(client, question, len(frames[0]))
            case request:
                self._admit(client, request, len(frames[0]))

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
        self._post(client, await self._aside.run(num_bytes, self._reception.answer, question))

    def _admit(self, client: Client, request: Request, num_bytes: int) -> None:
        live = self._reception.admit(client, request)
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
            prepared = await self._aside.run(num_bytes, self._prepare_if_wanted, live, request)
            if prepared is not None and self._desk.is_live(live):
                self._submit(live, request, prepared)
        except Refusal as refusal:
            if self._desk.is_live(live):
                self._refuse(live, refusal)

    def _prepare_if_wanted(self, live: Live, request: Request) -> Prepared | None:
        """In a thread, where long requests take turns: those that were cancelled meanwhile hold nobody up."""
        return self._reception.prepare(live, request) if live.asked.answers else None

    def _submit(self, live: Live, request: Request, prepared: Prepared) -> None:
        submit = self._reception.submit(live, request, prepared, time.monotonic())
        if not self._schedulers.submit(live.asked, submit):
            raise Refusal("overloaded", "the scheduler is far behind; ask again later", RETRY_AFTER_S)

    def _refuse(self, live: Live, refusal: Refusal) -> None:
        self._post(live.client, self._desk.fail(live, refusal.code, str(refusal), refusal.retry_after))
        self._end_if_drained()

    # ------------------------------------------------------------------------------- from the scheduler

    def _speak(self, messages: list[ToTokenizer]) -> None:
        items, aborts = self._desk.accept(messages, time.monotonic())
        self._schedulers.abort(aborts)
        for client, news in items.items():
            self._post(client, Batch(tuple(news)))
        self._end_if_drained()

    # ------------------------------------------------------------------------------------ to both sides

    def _post(self, client: Client, message: ToClient) -> None:
        delivery = self._door.send(client, self._encoder.encode(message))
        if delivery is Delivery.SENT:
            return
        lost = self._desk.drop_client(client)
        self._schedulers.abort(lost)
        if delivery is Delivery.FULL:
            mine = self._owed.setdefault(client, [])
            mine += last_words(message, lost)
            del mine[MAX_LIVE_REQUESTS:]  # more than it can have had at once: it goes on asking, and reads nothing
        self._end_if_drained()

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
                self._end_if_drained()
            for client, items in list(self._owed.items()):
                if self._door.send(client, self._encoder.encode(Batch(tuple(items)))) is not Delivery.FULL:
                    del self._owed[client]
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
                for client, items in self._desk.fail_all(code, message).items():
                    self._post(client, Batch(tuple(items)))
                self._done.set()
            case NewLimits(limits=limits):
                self._reception.measure_by(limits)
            case _:
                self._schedulers.obey(command)

    def _drain(self) -> None:
        self._reception.draining = True
        self._end_if_drained()

    def _end_if_drained(self) -> None:
        if self._reception.draining and self._desk.num_live == 0:
            self._done.set()


class TracedTokenizer(Tokenizer):
    """A tokenizer that leaves a record. What is prepared aside of the event loop is not in it."""

    async def serve(self, inbox: AsyncInbox[ToTokenizer], limits: Limits) -> None:
        folder = self._link.spec.config.trace_dir or ""
        self._lane, garbage = open_lanes(folder, "tokenizer", "loop", "garbage")
        record_collections(garbage)
        await super().serve(inbox, limits)

    def _hear(self, client: Client, frames: list[bytes]) -> None:
        begin_ns, number = self._lane.now(), self._desk.next_number
        super()._hear(client, frames)
        self._lane.end(Span.HEAR, begin_ns, number if self._desk.next_number > number else 0)

    def _speak(self, messages: list[ToTokenizer]) -> None:
        begin_ns = self._lane.now()
        super()._speak(messages)
        self._lane.end(Span.SPEAK, begin_ns, len(messages))


def main(link: SupervisorLink) -> None:
    """Load, and serve after `Begin`."""
    spec = link.spec
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 65_536)
    doors = Doors(link, partial(bind_front_door, spec.addresses.listen, context, spec.config.listen_key))
    codec = load_codec(Path(spec.paths.model), spec.config.pair_template)
    link.tell(Loaded())
    limits = link.wait_begin()
    rules = make_rules(codec, limits, spec.config)
    door = doors.open()

    async def serve() -> None:
        door.open()
        inbox: AsyncInbox[ToTokenizer] = AsyncInbox(spec.addresses.tokenizer, ToTokenizer, context)
        config, first_number = spec.config, (spec.incarnation << _NUMBER_BITS) + 1
        desk = FrontDesk(codec.pieces, first_number, config.data_parallel_size, config.restart_window)
        schedulers = make_schedulers(spec, context, desk)
        make = Tokenizer if config.trace_dir is None else TracedTokenizer
        tokenizer = make(door, schedulers, desk, Reception(desk, codec, rules, config), Aside(config), link)
        try:
            await tokenizer.serve(inbox, limits)
        finally:
            inbox.close()
            door.close()

    anyio.run(serve)
    context.term()


if __name__ == "__main__":
    run(main)
