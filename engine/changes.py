"""What of an engine is changed while it runs, as its supervisor does it: one order of the tokenizer's after the other.

Asleep, an engine has no workers: their end frees all that they had, and they are started again as those are that died.
Other weights are read by the workers there are, between two steps; if they cannot, by others in their place. It knows
nothing of requests.
"""

import threading
import time
from collections import deque
from collections.abc import Generator

import msgspec

from tercet.engine.child import Paths
from tercet.engine.children import Child
from tercet.engine.config import EngineConfig
from tercet.engine.crew import Crew
from tercet.engine.errors import ModelNotFound
from tercet.engine.first_standing import first_standing
from tercet.engine.log_line import log_line
from tercet.engine.model_files import locate
from tercet.engine.watch import HTTP, TOKENIZER, Watch
from tercet.ipc.change_messages import LoadAdapter, Sleep, UnloadAdapter, UpdateWeights, WakeUp
from tercet.ipc.process_messages import (
    ExchangeWeights,
    LoadedAdapter,
    Order,
    Outcome,
    PlaceAdapter,
    Tried,
    TryWeights,
)

Waits = Generator[None, None, None]
"""A change in the making, which goes on when anything has happened."""


class _Refused(Exception):
    """It is not made, and all is as it was."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Changes:
    """`paths`: what the processes of the engine are started on from now on."""

    def __init__(self, config: EngineConfig, crew: Crew, paths: Paths) -> None:
        self._crew = crew
        self._config = config
        more = max(config.max_adapters - len(paths.adapters), 0)
        self.paths = msgspec.structs.replace(paths, adapters=(*paths.adapters, *(None,) * more))
        self.standing = first_standing(config)
        self._num_loads = len(self.standing.adapters)
        self._orders: deque[tuple[Child, Order]] = deque()
        self._making: tuple[Order, Waits] | None = None
        self._tried: dict[tuple[Child, int], Tried] = {}
        self._found: dict[str, str] = {}
        """Where what was tried is."""

    def order(self, tokenizer: Child, order: Order) -> None:
        self._orders.append((tokenizer, order))

    def note(self, worker: Child, tried: Tried) -> None:
        self._tried[worker, tried.number] = tried

    def tell(self, child: Child) -> None:
        """To one that is new: how things stand."""
        if child.post == TOKENIZER and self.standing.falls_asleep:  # who asked its predecessor asks anew
            self._stands(falls_asleep=False)
        if child.post in (HTTP, TOKENIZER):
            child.tell(self.standing)

    def turn(self, watch: Watch) -> None:
        """Make what can be made by now."""
        while self._making is not None or self._orders:
            if self._making is None:
                tokenizer, order = self._orders.popleft()
                if tokenizer not in self._crew.children:  # its clients ask its successor
                    continue
                self._making = order, self._make(order, watch)
            order, making = self._making
            outcome = Outcome(order.number)
            try:
                next(making)
                return
            except StopIteration:
                pass
            except _Refused as refused:
                outcome = Outcome(order.number, refused.code, str(refused))
                log_line(f"tercet: {type(order.change).__name__} was not done: {refused}")
            self._making = None
            self._tried.clear()
            if (tokenizer := self._crew.only(TOKENIZER)) is not None:  # type: ignore[assignment]
                tokenizer.tell(outcome)

    def _make(self, order: Order, watch: Watch) -> Waits:
        match order.change:
            case Sleep() if order.only_try:
                self._stands(falls_asleep=True)
            case Sleep():
                watch.send_away()
                self._stands(is_asleep=True, falls_asleep=False)
                log_line("tercet: asleep: the workers have ended")
                yield from ()
            case WakeUp(model=None):
                yield from self._wake(watch, self.paths.weights, self.standing.weights)
            case WakeUp(model=str(model)):
                if not self.standing.is_asleep:
                    raise _Refused("invalid_request", "model came for an engine that is awake; want UpdateWeights")
                yield from self._wake(watch, (yield from self._located(model)), model)
            case UpdateWeights(model=model):
                if self.standing.is_asleep:
                    raise _Refused("asleep", "the engine is asleep; want WakeUp, which takes a model, too")
                if order.only_try:
                    path = self._found[model] = yield from self._located(model)
                    yield from self._asked(watch, TryWeights(order.number, path), of_all=False)
                else:
                    path = self._found.pop(model, "") or (yield from self._located(model))
                    yield from self._exchange(watch, order.number, path, model)
            case LoadAdapter(name=name, folder=folder):
                yield from self._load(watch, order.number, name, folder)
            case UnloadAdapter(name=name):
                self._unload(name)

    def _wake(self, watch: Watch, path: str | None, name: str) -> Waits:
        before, self.paths = self.paths, msgspec.structs.replace(self.paths, weights=path)
        failure = yield from self._started(watch, other_weights=self.paths.weights != before.weights)
        if failure is not None:
            self.paths = before
            watch.send_away()
            raise _Refused("change_failed", f"the engine is asleep as before: {failure}")
        self._stands(is_asleep=False, weights=name)

    def _exchange(self, watch: Watch, number: int, path: str, name: str) -> Waits:
        """Those that wait go on with whatever weights there are in the end."""
        yield from self._all_there(watch)
        before, self.paths = self.paths, msgspec.structs.replace(self.paths, weights=path)
        failure = yield from self._read_in_place(watch, ExchangeWeights(number, path))
        if failure is not None:
            log_line(f"tercet: new workers are started on other weights, which those there are do not read: {failure}")
            watch.send_away()
            failure = yield from self._started(watch, other_weights=True)
        if failure is not None:
            self.paths = before
            watch.send_away()
            watch.send_for(on_trial=False, other_weights=True)
            while watch.lacks_workers:
                yield
            raise _Refused("change_failed", f"the weights are those of {self.standing.weights!r} as before: {failure}")
        self._stands(weights=name)
        log_line(f"tercet: the weights are those of {name!r}")

    def _all_there(self, watch: Watch) -> Waits:
        """Nobody is being replaced who computes or plans."""
        while watch.lacks_workers or len(self._of("scheduler")) < self._config.data_parallel_size:
            yield

    def _read_in_place(self, watch: Watch, question: ExchangeWeights) -> Generator[None, None, str | None]:
        """All workers have read them, and schedulers know it; or why not, and then nobody knows what a worker has."""
        schedulers, workers = self._of("scheduler"), self._of("worker")
        watch.put_on_trial()
        for scheduler in schedulers:
            scheduler.tell(question)
        deadline = time.monotonic() + self._config.startup_timeout
        while True:
            if watch.failure is not None:
                return watch.failure
            for scheduler in schedulers:  # its successor would plan steps while weights are read
                if scheduler not in self._crew.children:
                    return f"{scheduler.name} died meanwhile"
            answers = [self._tried.get((worker, question.number)) for worker in workers]
            for answer in answers:
                if answer is not None and answer.complaint is not None:
                    return answer.complaint
            if None not in answers:
                watch.begin_anew()
                return None
            if time.monotonic() > deadline:
                return f"it takes longer than --startup-timeout {self._config.startup_timeout:g} s"
            yield

    def _of(self, role: str) -> list[Child]:
        return [child for child in self._crew.children if child.post.role == role]

    def _started(self, watch: Watch, *, other_weights: bool) -> Generator[None, None, str | None]:
        """All workers serve; or why they do not."""
        watch.send_for(on_trial=True, other_weights=other_weights)
        while watch.lacks_workers and watch.failure is None:
            yield
        return watch.failure

    def _load(self, watch: Watch, number: int, name: str, folder: str) -> Waits:
        if self.standing.is_asleep:
            raise _Refused("asleep", "the engine is asleep; want it woken up before an adapter is loaded")
        if any(one.name == name for one in self.standing.adapters):  # a tokenizer that died had asked for it
            raise _Refused("invalid_request", f"name is {name!r}; want another: an adapter of that name is loaded")
        if None not in self.paths.adapters:
            names = ", ".join(repr(one.name) for one in self.standing.adapters)
            raise _Refused("no_room", f"all {len(self.paths.adapters)} places (--max-adapters) are taken, by {names}")
        place = self.paths.adapters.index(None)
        path = yield from self._located(folder, name)
        yield from self._asked(watch, PlaceAdapter(number, place, path), of_all=True)
        self._place(place, path)
        self._stands(adapters=(*self.standing.adapters, LoadedAdapter(name, place, self._num_loads)))
        self._num_loads += 1
        log_line(f"tercet: adapter {name!r} is loaded, from {path}")

    def _unload(self, name: str) -> None:
        """Nobody asks for what is in its place: that may stay until it is another's."""
        for gone in [one for one in self.standing.adapters if one.name == name]:
            self._place(gone.place, None)
            self._stands(adapters=tuple(one for one in self.standing.adapters if one != gone))
            log_line(f"tercet: adapter {name!r} is unloaded")

    def _place(self, place: int, path: str | None) -> None:
        """For whoever is started from now on."""
        adapters = list(self.paths.adapters)
        adapters[place] = path
        self.paths = msgspec.structs.replace(self.paths, adapters=tuple(adapters))

    def _located(self, source: str, adapter: str | None = None) -> Generator[None, None, str]:
        """A thread looks: what comes from the hub may take its time."""
        found: list[str | Exception] = []

        def look() -> None:
            try:
                found.append(str(locate(source, adapter)))
            except Exception as error:  # noqa: BLE001  whatever it is, somebody waits for it
                found.append(error)
            self._crew.wake()

        threading.Thread(target=look, name="locate", daemon=True).start()
        while not found:
            yield
        match found[0]:
            case str(path):
                return path
            case ModelNotFound() as error:
                raise _Refused("invalid_request", str(error))
            case error:
                raise _Refused("invalid_request", f"{source!r}: {type(error).__name__}: {error}")

    def _asked(self, watch: Watch, question: TryWeights | PlaceAdapter, *, of_all: bool) -> Waits:
        """One worker, which knows its model, or all of them find nothing wrong."""
        while watch.lacks_workers:
            yield
        workers = self._of("worker")
        asked = workers if of_all else workers[:1]
        for worker in asked:
            worker.tell(question)
        for worker in asked:  # all of them, before anything is asked anew
            while worker in self._crew.children and (worker, question.number) not in self._tried:
                yield
        for worker in workers:  # who has taken one's place since knows nothing of it
            if worker not in self._crew.children:
                raise _Refused("change_failed", f"{worker.name} died while it looked at {question.path}; ask again")
        for worker in asked:
            if (complaint := self._tried[worker, question.number].complaint) is not None:
                raise _Refused("invalid_request", complaint)

    def _stands(self, **changed: object) -> None:
        """The HTTP door hears of it first: whoever is answered by the tokenizer finds that it knows."""
        self.standing = msgspec.structs.replace(self.standing, **changed)
        for post in (HTTP, TOKENIZER):
            if (child := self._crew.only(post)) is not None:
                child.tell(self.standing)
