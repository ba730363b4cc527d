"""The changes of the engine that clients have asked the tokenizer for, one after the other, and who waits for them.

Pure: no socket, no clock. The supervisor makes a change, when nothing that runs is in its way; this knows when that is.
Each is answered once, in the order they were asked for.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tercet.engine.adapter_line import AdapterLine, failure_of
from tercet.engine.front_desk import FrontDesk
from tercet.engine.live import Client, Live
from tercet.engine.preparation import Prepared
from tercet.engine.refusal import ASLEEP, TAKES_NO_MORE
from tercet.ipc.answers import ToClient
from tercet.ipc.change_messages import Change, Changed, OfAdapters, OfEngine, Sleep, UpdateWeights, WakeUp
from tercet.ipc.messages import Request
from tercet.ipc.process_messages import Order, Outcome, Standing

_MOST_CHARACTERS = 4096
"""As of a path."""
NOT_ALLOWED = "this engine takes no changes while it runs; want it started with --allow-changes"


@dataclass
class _Asked:
    client: Client
    change: OfEngine
    is_tried: bool = False
    """The supervisor knows of it, and finds nothing wrong with it."""
    has_begun: bool = False
    """From here on newcomers wait for it, or are refused."""
    number: int | None = None
    """Of the order, while it is the supervisor's turn."""


@dataclass(frozen=True)
class Held:
    """A request that nothing is wrong with, and that waits for a change."""

    live: Live
    request: Request
    prepared: Prepared


class ChangeLine:
    """`order` tells the supervisor, under numbers of `numbers`, `answer` a client; `end_all` ends what is live, saying
    why; `submit` lets who was held go on."""

    def __init__(
        self,
        desk: FrontDesk,
        adapters: AdapterLine,
        numbers: Iterator[int],
        order: Callable[[Order], None],
        answer: Callable[[Client, ToClient], None],
        end_all: Callable[[str], None],
        submit: Callable[[Held], None],
    ) -> None:
        self._desk = desk
        self.adapters = adapters
        self._numbers = numbers
        self._order, self._answer, self._end_all, self._submit = order, answer, end_all, submit
        self._line: deque[_Asked] = deque()
        self._held: list[Held] = []
        self.is_settled = False
        """Who comes now is new: whatever a tokenizer that died had begun is back."""
        self.is_asleep = False

    @property
    def refusal(self) -> str | None:
        """Of newcomers: why they come in vain."""
        falls_asleep = self._head is not None and self._head.has_begun and isinstance(self._head.change, Sleep)
        return ASLEEP if self.is_settled and (self.is_asleep or falls_asleep) else None

    @property
    def holds(self) -> bool:
        """Newcomers wait for other weights."""
        head = self._head
        return head is not None and head.has_begun and isinstance(head.change, UpdateWeights)

    def hold(self, held: Held, now: float) -> None:
        """Until the change is made, or is not. Its wait has begun."""
        held.live.asked.waits_since = held.live.asked.waits_since or now
        self._held.append(held)
        self.go_on()  # it may have been the last that was not held

    def ask(self, client: Client, change: Change) -> None:
        if (complaint := _complaint(change)) is not None:
            self._answer(client, failure_of(change, "invalid_request", complaint))
            return
        if isinstance(change, OfAdapters):
            self.adapters.ask(client, change)
            return
        self._line.append(_Asked(client, change))
        self.go_on()

    def settle(self) -> None:
        self.is_settled = self.adapters.is_settled = True
        self.go_on()

    def stand(self, standing: Standing) -> None:
        """How things are by now."""
        self.is_asleep = standing.is_asleep
        self.adapters.stand(standing.adapters)

    def go_on(self) -> None:
        """As far as can be now: a change was asked for, a request has ended, or the supervisor has done its part."""
        self.adapters.go_on()
        while self.is_settled and (head := self._head) is not None and head.number is None:
            match head.change:
                case Sleep() if self.is_asleep:
                    self._end(Changed(head.change.request_id))
                case WakeUp(model=None) if not self.is_asleep:
                    self._end(Changed(head.change.request_id))
                case Sleep() | UpdateWeights() if not head.is_tried:
                    head.has_begun = isinstance(head.change, Sleep)
                    self._hand_over(head, only_try=True)
                case Sleep(mode=mode) | UpdateWeights(mode=mode):
                    head.has_begun = head.has_begun or mode != "keep"
                    if mode == "keep" or not self._num_running:
                        self._hand_over(head)
                    elif mode == "abort":
                        self._end_all("the engine was told to end what runs, for a change of itself; ask again")
                    else:
                        return
                case WakeUp():
                    self._hand_over(head)

    def hear(self, outcome: Outcome) -> None:
        """Of an order; of one that a tokenizer gave that died, there is nothing to be done."""
        self.adapters.hear(outcome)
        head = self._head
        if head is None or head.number != outcome.number:
            return
        head.number = None
        if outcome.code is not None:
            self._end(failure_of(head.change, outcome.code, outcome.message))
        elif not (isinstance(head.change, WakeUp) or head.is_tried):
            head.is_tried = True
        else:
            self._end(Changed(head.change.request_id))
        self.go_on()

    def drain(self) -> None:
        """The engine ends: what is not in the supervisor's hands by now will not be done."""
        kept = [one for one in self._line if one.number is not None]
        ended = [one for one in self._line if one.number is None]
        self._line = deque(kept)
        self._fail(ended, "draining", TAKES_NO_MORE)
        self._let_go()

    def end(self, code: str = "draining", message: str = TAKES_NO_MORE) -> None:
        """Nor will anybody hear what has become of the rest."""
        self.adapters.end(code, message)
        ended, self._line = list(self._line), deque()
        self._fail(ended, code, message)

    @property
    def _head(self) -> _Asked | None:
        return self._line[0] if self._line else None

    @property
    def _num_running(self) -> int:
        """Answers that were begun, or may be any time."""
        return self._desk.num_live - sum(len(held.live.asked.answers) for held in self._held)

    def _hand_over(self, asked: _Asked, *, only_try: bool = False) -> None:
        asked.number = next(self._numbers)
        self._order(Order(asked.number, asked.change, only_try))

    def _end(self, answer: ToClient) -> None:
        asked = self._line.popleft()
        self._answer(asked.client, answer)
        self._let_go()

    def _let_go(self) -> None:
        if not self.holds:
            held, self._held = self._held, []
            for one in held:
                if self._desk.is_live(one.live):
                    self._submit(one)

    def _fail(self, ended: list[_Asked], code: str, message: str) -> None:
        for asked in ended:
            self._answer(asked.client, failure_of(asked.change, code, message))


def _complaint(change: Change) -> str | None:
    """Of what is wrong whatever the engine is."""
    for name in ("model", "folder"):
        source = getattr(change, name, None)
        if source is not None and not 1 <= len(source) <= _MOST_CHARACTERS:
            return f"{name} has {len(source)} characters; want 1 to {_MOST_CHARACTERS}"
    return None
