"""PROCESS tokenizer: text on the clients' side, token ids on the scheduler's.

It owns the connections of clients and the life of each request as its client sees it: exactly one terminal message,
whatever happens. It knows nothing of pages, slots or steps. What it decides is in `front_desk.py`, `reception.py` and
`request_check.py`; this shell moves messages.
"""

import asyncio
import contextlib
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
import zmq

from tercet.engine.child import SupervisorLink, run
from tercet.engine.doors import Doors
from tercet.engine.errors import AddressTaken, StartupFailed, UnsupportedModel
from tercet.engine.front_desk import FrontDesk, Item
from tercet.engine.live import Client, Live
from tercet.engine.reception import Reception
from tercet.engine.refusal import Refusal
from tercet.engine.request_check import MAX_STOP_IDS, Rules, check_defaults
from tercet.engine.text_codec import TextCodec, load_codec
from tercet.engine.trace import Span, open_lane, record_collections
from tercet.ipc.front_door import Delivery, FrontDoor
from tercet.ipc.messages import (
    Batch,
    Cancel,
    Detokenize,
    EngineInfo,
    Failed,
    Finished,
    Hello,
    Question,
    Rejected,
    Request,
    ToClient,
    Tokenize,
)
from tercet.ipc.process_messages import Abandon, Drain, Limits, Loaded, SchedulerRestarted, Serving, ToChild
from tercet.ipc.sockets import AddressInUse, AsyncInbox, Outbox
from tercet.ipc.step_messages import Abort, Forget, Load, ToTokenizer

_TICK_S = 0.25
_RETRY_S = 0.01
"""Between attempts to submit to a scheduler that is far behind."""
_SETTLE_S = 0.1
"""From a connection's end until its socket surely knows."""
_LONGEST_TURN_S = 0.002
"""New requests may keep running ones waiting this long."""
_ENCODING_THREADS = 2
_NUMBER_BITS = 40
"""More requests than one incarnation of this process will see: those of two have different numbers."""


class Tokenizer:
    """The running process: sockets on both sides, the desk between them."""

    def __init__(
        self,
        door: FrontDoor,
        connect: Callable[[], Outbox],
        desk: FrontDesk,
        reception: Reception,
        link: SupervisorLink,
    ) -> None:
        """`connect` makes the way to the scheduler, and another one to its successor."""
        self._door = door
        self._connect = connect
        self._scheduler = connect()
        self._new_scheduler = asyncio.Event()
        self._desk = desk
        self._reception = reception
        self._link = link
        self._encoder = msgspec.msgpack.Encoder()
        self._done = anyio.Event()
        self._unsent_aborts: list[int] = []
        self._owed: dict[Client, list[Item]] = {}
        """The last words to clients that could not be sent any more."""
        self._encoding = anyio.CapacityLimiter(_ENCODING_THREADS)

    async def serve(self, inbox: AsyncInbox[ToTokenizer], limits: Limits) -> None:
        """Until drained or abandoned."""
        config = self._link.spec.config
        self._name, self._limits = config.served_model_name or config.model, limits
        self._version = version("tercet")
        self._tool_format, self._reasoning_format = self._reception.formats(config)
        self._desk.load = Load(0, 0, limits.num_pages - 1, limits.num_pages, 0, 0, 0, 0)  # until the scheduler says
        if self._link.spec.incarnation:  # there may be requests of a tokenizer that died
            self._scheduler.send(Forget(self._desk.next_number))
        loop = asyncio.get_running_loop()
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            for work in (self._serve_clients, self._notice_departures, self._follow_schedulers, self._tick):
                tasks.start_soon(work)
            tasks.start_soon(self._serve_scheduler, inbox)
            self._link.subscribe(partial(self._obey_soon, loop))
            self._link.tell(Serving())
            await self._done.wait()
            tasks.cancel_scope.cancel()
        self._scheduler.close()

    # --------------------------------------------------------------------------------- from clients

    async def _serve_clients(self) -> None:
        while True:
            turn_began = time.monotonic()
            for client, *frames in await self._door.receive():
                self._hear(client, frames)
                if time.monotonic() - turn_began > _LONGEST_TURN_S:
                    await anyio.lowlevel.checkpoint()
                    turn_began = time.monotonic()

    def _hear(self, client: Client, frames: list[bytes]) -> None:
        match self._reception.decode(frames):
            case Rejected() as rejected:
                self._post(client, rejected)
            case Hello():
                self._post(client, self._info())
            case Cancel(request_id=request_id):
                numbers, ends = self._desk.cancel(client, request_id, time.monotonic())
                if ends:
                    self._abort(numbers)
                    self._post(client, Batch(tuple(ends)))
                    self._end_if_drained()
            case Tokenize() | Detokenize() as question:
                if self._reception.is_quick(question):
                    self._post(client, self._reception.answer(question))
                else:
                    self._tasks.start_soon(self._answer_aside, client, question)
            case request:
                self._admit(client, request)

    async def _answer_aside(self, client: Client, question: Question) -> None:
        self._post(client, await anyio.to_thread.run_sync(self._reception.answer, question, limiter=self._encoding))

    def _admit(self, client: Client, request: Request) -> None:
        live = self._reception.admit(client, request)
        if not isinstance(live, Live):
            self._post(client, live)
            return
        if request.handling.timeout is not None:
            self._desk.give_time(live, request.handling.timeout, time.monotonic())
        if self._reception.is_quick(request):
            try:
                self._submit(live, request, self._reception.encode(request))
            except Refusal as refusal:
                self._refuse(live, refusal)
        else:
            self._tasks.start_soon(self._encode_aside, live, request)

    async def _encode_aside(self, live: Live, request: Request) -> None:
        try:
            prompt_ids = await anyio.to_thread.run_sync(self._reception.encode, request, limiter=self._encoding)
            if self._desk.is_live(live):
                self._submit(live, request, prompt_ids)
        except Refusal as refusal:
            if self._desk.is_live(live):
                self._refuse(live, refusal)

    def _submit(self, live: Live, request: Request, prompt_ids: Sequence[int]) -> None:
        submit = self._reception.submit(live, request, prompt_ids)
        if not self._scheduler.try_send(submit):
            raise Refusal("overloaded", "the scheduler is far behind; ask again later")

    def _refuse(self, live: Live, refusal: Refusal) -> None:
        self._post(live.client, self._desk.fail(live, refusal.code, str(refusal)))
        self._end_if_drained()

    def _info(self) -> EngineInfo:
        load = self._desk.load
        return EngineInfo(
            self._name,
            self._version,
            self._limits.max_model_len,
            self._limits.vocab_size,
            load.num_running,
            load.num_waiting,
            load.num_free_pages,
            load.num_pages,
            load.num_steps,
            load.num_preemptions,
            load.num_prefix_queries,
            load.num_prefix_hits,
            self._tool_format,
            self._reasoning_format,
            self._reception.eos_ids,
        )

    # ------------------------------------------------------------------------------- from the scheduler

    async def _serve_scheduler(self, inbox: AsyncInbox[ToTokenizer]) -> None:
        while True:
            self._speak(await inbox.receive())

    def _speak(self, messages: list[ToTokenizer]) -> None:
        items, aborts = self._desk.accept(messages, time.monotonic())
        self._abort(aborts)
        for client, news in items.items():
            self._post(client, Batch(tuple(news)))
        self._end_if_drained()

    # ------------------------------------------------------------------------------------ to both sides

    def _post(self, client: Client, message: ToClient) -> None:
        delivery = self._door.send(client, self._encoder.encode(message))
        if delivery is Delivery.SENT:
            return
        lost = self._desk.drop_client(client)
        self._abort([live.number for live in lost])
        if delivery is Delivery.FULL:
            items = message.items if isinstance(message, Batch) else (message,) if isinstance(message, Failed) else ()
            owed = {item.request_id: item for item in items if isinstance(item, Failed)}
            names = [item.request_id for item in items if isinstance(item, Finished)]
            for name in (*names, *(live.request_id for live in lost)):
                owed[name] = Failed(name, "slow_client", "the client reads too slowly; its requests were cancelled")
            self._owed.setdefault(client, []).extend(owed.values())
        self._end_if_drained()

    def _abort(self, numbers: list[int]) -> None:
        self._unsent_aborts += numbers
        if self._unsent_aborts and self._scheduler.try_send(Abort(array("q", self._unsent_aborts).tobytes())):
            self._unsent_aborts = []

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
            self._abort([])
            for client, numbers, failed in self._desk.expire(time.monotonic()):
                self._abort(numbers)
                self._post(client, failed)
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
                self._reception.draining = True
                self._end_if_drained()
            case Abandon(message=message, code=code):
                for client, items in self._desk.fail_all(code, message).items():
                    self._post(client, Batch(tuple(items)))
                self._done.set()
            case SchedulerRestarted():
                self._new_scheduler.set()
            case _:
                raise AssertionError(f"the link keeps {command!r} to itself")

    async def _follow_schedulers(self) -> None:
        """To each new scheduler, that knows nobody: all that is live, from where it stands."""
        while True:
            await self._new_scheduler.wait()
            self._new_scheduler.clear()
            self._scheduler.abandon()  # what the old one has not got must not reach the new one
            self._scheduler = self._connect()
            self._unsent_aborts.clear()
            self._scheduler.send(Forget(self._desk.next_number))
            for asked in self._desk.renumber():
                while asked.answers and not self._new_scheduler.is_set():
                    if self._scheduler.try_send(asked.submit(again=True)):
                        break
                    await anyio.sleep(_RETRY_S)

    def _end_if_drained(self) -> None:
        if self._reception.draining and self._desk.num_live == 0:
            self._done.set()


class TracedTokenizer(Tokenizer):
    """A tokenizer that leaves a record. What is encoded aside of the event loop is not in it."""

    async def serve(self, inbox: AsyncInbox[ToTokenizer], limits: Limits) -> None:
        folder = self._link.spec.config.trace_dir or ""
        self._lane = open_lane(folder, "tokenizer", "loop")
        record_collections(open_lane(folder, "tokenizer", "garbage"))
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

    def bind() -> FrontDoor:
        try:
            return FrontDoor(spec.addresses.listen, context, spec.config.listen_key)
        except AddressInUse as error:
            raise AddressTaken(str(error)) from None
        except OSError as error:
            raise StartupFailed(str(error)) from None

    doors = Doors(link, bind)
    codec = load_codec(Path(spec.model_path))
    link.tell(Loaded())
    limits = link.wait_begin()
    rules = make_rules(codec, limits, spec.config.seed)
    door = doors.open()

    async def serve() -> None:
        door.open()
        inbox: AsyncInbox[ToTokenizer] = AsyncInbox(spec.addresses.tokenizer, ToTokenizer, context)
        desk = FrontDesk(codec.pieces, (spec.incarnation << _NUMBER_BITS) + 1)
        connect = partial(Outbox, spec.addresses.scheduler, context)
        make = Tokenizer if spec.config.trace_dir is None else TracedTokenizer
        tokenizer = make(door, connect, desk, Reception(desk, codec, rules), link)
        try:
            await tokenizer.serve(inbox, limits)
        finally:
            inbox.close()
            door.close()

    anyio.run(serve)
    context.term()


def make_rules(codec: TextCodec, limits: Limits, seed: int) -> Rules:
    """What requests are measured against; says aloud what the checkpoint's defaults change."""
    eos_ids = tuple(token_id for token_id in codec.eos_ids if 0 <= token_id < limits.vocab_size)
    if len(eos_ids) > MAX_STOP_IDS:
        raise UnsupportedModel(f"the checkpoint has {len(eos_ids)} end-of-sequence ids; want at most {MAX_STOP_IDS}")
    rules = Rules(limits, codec.defaults, eos_ids, seed, codec.longest_token, codec.tokenizer is not None)
    try:
        check_defaults(rules)
    except Refusal as refusal:
        raise UnsupportedModel(f"the checkpoint's generation_config.json: {refusal}") from None
    given = {name: value for name, value in msgspec.structs.asdict(codec.defaults).items() if value is not None}
    if given:
        listed = ", ".join(f"{name} {value}" for name, value in given.items())
        print(f"defaults from generation_config.json: {listed} (what a request says wins)", file=sys.stderr)
    return rules


if __name__ == "__main__":
    run(main)
