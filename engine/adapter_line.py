"""The adapters that requests may name, as they come and go, and the clients that have asked for that.

Pure: no socket, no clock. The supervisor has adapters loaded, and their places become free when it is told that nobody
has them any more; this knows when that is. What one waits for holds up no other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tercet.engine.config import EngineConfig
from tercet.engine.front_desk import FrontDesk
from tercet.engine.live import Client
from tercet.engine.refusal import RETRY_AFTER_S, Refusal, invalid
from tercet.engine.request_check import MAX_NAME_LENGTH
from tercet.ipc.answers import Failed, ToClient
from tercet.ipc.change_messages import Change, Changed, LoadAdapter, OfAdapters, UnloadAdapter
from tercet.ipc.process_messages import LoadedAdapter, Order, Outcome
from tercet.ipc.step_messages import Sampling


@dataclass(frozen=True)
class _Asked:
    client: Client
    change: OfAdapters


class AdapterLine:
    """`order` tells the supervisor, under numbers of `numbers`; `answer` a client."""

    def __init__(
        self,
        desk: FrontDesk,
        config: EngineConfig,
        numbers: Iterator[int],
        order: Callable[[Order], None],
        answer: Callable[[Client, ToClient], None],
    ) -> None:
        self._desk, self._config, self._numbers = desk, config, numbers
        self._order, self._answer = order, answer
        self._loaded: dict[str, LoadedAdapter] = {}
        self._leaving: dict[str, list[_Asked]] = {}
        """By name, who asked for that. Nobody may name them any more, but some have."""
        self._ordered: dict[int, list[_Asked]] = {}
        """In the supervisor's hands."""
        self.is_settled = False
        """As of `ChangeLine`."""

    @property
    def known(self) -> dict[str, LoadedAdapter]:
        """That requests may name."""
        gone = {*self._leaving, *self._in_hand(UnloadAdapter)}
        return {name: one for name, one in self._loaded.items() if name not in gone}

    def stand(self, adapters: tuple[LoadedAdapter, ...]) -> None:
        """What there is by now."""
        self._loaded = {one.name: one for one in adapters}

    def check(self, sampling: Sampling) -> None:
        """Of a request that named one a while ago. Raises `Refusal` if its place may be another's by now."""
        if sampling.adapter_load < 0:
            return
        gone = self._in_hand(UnloadAdapter)
        if sampling.adapter_load not in {one.load for one in self._loaded.values() if one.name not in gone}:
            raise Refusal("invalid_request", "adapter was unloaded while the request waited; want another, or none")

    def ask(self, client: Client, change: OfAdapters) -> None:
        asked = _Asked(client, change)
        try:
            match change:
                case LoadAdapter(name=name):
                    self._check_new(name)
                    self._hand_over([asked])
                case UnloadAdapter(name=name):
                    self._check_old(name)
                    self._leaving.setdefault(name, []).append(asked)
                    self.go_on()
        except Refusal as refusal:
            self._answer(client, failure_of(change, refusal.code, str(refusal)))

    def go_on(self) -> None:
        """Requests have ended: whoever leaves and is nobody's any more has left."""
        if self._leaving and self.is_settled:
            for name in list(self._leaving):
                if name not in self._loaded:  # a predecessor had told the supervisor
                    self._answer_all(self._leaving.pop(name), Outcome(0))
                elif not self._desk.outstanding.adapters[self._loaded[name].load]:
                    self._hand_over(self._leaving.pop(name))

    def hear(self, outcome: Outcome) -> None:
        self._answer_all(self._ordered.pop(outcome.number, []), outcome)

    def end(self, code: str, message: str) -> None:
        """The engine ends."""
        every = [one for several in (*self._leaving.values(), *self._ordered.values()) for one in several]
        self._leaving.clear()
        self._ordered.clear()
        for asked in every:
            self._answer(asked.client, failure_of(asked.change, code, message))

    def _answer_all(self, several: list[_Asked], outcome: Outcome) -> None:
        for asked in several:
            change = asked.change
            answer = None if outcome.code is None else failure_of(change, outcome.code, outcome.message)
            self._answer(asked.client, answer or Changed(change.request_id))

    def _in_hand(self, kind: type[OfAdapters]) -> set[str]:
        """Names of those that the supervisor is told to load, or to unload."""
        return {several[0].change.name for several in self._ordered.values() if isinstance(several[0].change, kind)}

    def _hand_over(self, several: list[_Asked]) -> None:
        number = next(self._numbers)
        self._ordered[number] = several
        self._order(Order(number, several[0].change))

    def _check_new(self, name: str) -> None:
        served = self._config.served_model_name or self._config.model
        if not self._config.max_adapters:
            raise _refused("no place is for adapters that come later; want the engine started with --max-adapters")
        if not 1 <= len(name) <= MAX_NAME_LENGTH:
            raise invalid("name", f"of {len(name)} characters", f"1 to {MAX_NAME_LENGTH}")
        if name == served:
            raise invalid("name", repr(name), "another: it is the model's")
        if name in self._in_hand(LoadAdapter):
            raise invalid("name", repr(name), "another: an adapter of that name is being loaded")
        if name in self._leaving or name in self._in_hand(UnloadAdapter):
            raise invalid("name", repr(name), "another: the adapter of that name has not left yet")
        if name in self._loaded:
            raise invalid("name", repr(name), "another, or the adapter of that name unloaded before")

    def _check_old(self, name: str) -> None:
        if name not in self._loaded or name in self._in_hand(UnloadAdapter):
            known = ", ".join(map(repr, self.known)) or "no adapter"
            raise Refusal("not_found", f"name is {name[:MAX_NAME_LENGTH]!r}; there is {known}")
        if not self._config.max_adapters:
            raise _refused("the adapters of the start stay; want the engine started with --max-adapters")


def failure_of(change: Change, code: str, message: str) -> Failed:
    """A change was not made. An engine that drains may have a successor, who is worth asking."""
    return Failed(change.request_id, code, message, RETRY_AFTER_S if code == "draining" else None)


def _refused(text: str) -> Refusal:
    return Refusal("invalid_request", text)
