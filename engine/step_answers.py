"""A worker's tokens on their way to the scheduler: sent at once, by a thread that waits for the device, or not at all.

Also that a step has come to its draw, if it awaits masks, and that pages are copied. Knows landings and where their
tokens go; when steps are launched is the worker's matter.
"""

import queue
import threading
import time
from collections.abc import Callable
from functools import partial

from tercet.engine.step_runner import Landing, Midway
from tercet.ipc.sockets import Outbox
from tercet.ipc.step_messages import Computed, Sampled, Step
from tercet.ipc.swap_messages import Swap, Swapped


class Answers:
    """Sends tokens that are there already, as a CPU's are."""

    def __init__(self, address: str) -> None:
        self._scheduler = Outbox(address)

    def put(self, step: Step, index: int, landing: Landing) -> None:
        token_ids = landing.wait().tobytes()
        self._scheduler.send(Sampled(step.step_id, index, token_ids, step.epoch, *landing.beyond()))

    def tell_midway(self, step: Step, midway: Midway) -> None:
        midway.wait()
        self._scheduler.send(Computed(step.step_id, step.epoch))

    def tell_swapped(self, swap: Swap, made: Midway) -> None:
        made.wait()
        self._scheduler.send(Swapped(swap.number, swap.epoch))

    def then(self, call: Callable[[], None]) -> None:
        """When all is told so far: nobody looks at the model for that any more."""
        call()

    def overdue(self, seconds: float) -> bool:
        """Whether tokens have been awaited for so long that the device must hang."""
        return False


class LateAnswers:
    """Waits for landings in a thread of its own, in launch order, so that the step loop never waits for the device."""

    def __init__(self, address: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[Answers], None]] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._waiting_since: float | None = None
        threading.Thread(target=self._run, args=(address,), name="answers", daemon=True).start()

    def put(self, step: Step, index: int, landing: Landing) -> None:
        self._call(partial(Answers.put, step=step, index=index, landing=landing))

    def tell_midway(self, step: Step, midway: Midway) -> None:
        self._call(partial(Answers.tell_midway, step=step, midway=midway))

    def tell_swapped(self, swap: Swap, made: Midway) -> None:
        self._call(partial(Answers.tell_swapped, swap=swap, made=made))

    def then(self, call: Callable[[], None]) -> None:
        self._call(partial(Answers.then, call=call))

    def overdue(self, seconds: float) -> bool:
        if self._failure is not None:
            raise self._failure
        since = self._waiting_since
        return since is not None and time.monotonic() - since > seconds

    def _call(self, call: Callable[[Answers], None]) -> None:
        if self._failure is not None:
            raise self._failure
        self._calls.put(call)

    def _run(self, address: str) -> None:
        answers = Answers(address)
        try:
            while True:
                call = self._calls.get()
                self._waiting_since = time.monotonic()
                call(answers)
                self._waiting_since = None
        except BaseException as error:  # raised in the step loop, which ends the process
            self._failure = error
            raise


class NoAnswers:
    """Ranks other than 0 agree with it and stay silent."""

    def put(self, step: Step, index: int, landing: Landing) -> None:
        pass

    def tell_midway(self, step: Step, midway: Midway) -> None:
        pass

    def tell_swapped(self, swap: Swap, made: Midway) -> None:
        pass

    def then(self, call: Callable[[], None]) -> None:
        call()

    def overdue(self, seconds: float) -> bool:
        return False


AnyAnswers = Answers | LateAnswers | NoAnswers


def make_answers(rank: int, address: str, *, by_itself: bool) -> AnyAnswers:
    """Of a rank. `by_itself`: somebody else computes, while this process goes on."""
    if rank != 0:
        return NoAnswers()
    return LateAnswers(address) if by_itself else Answers(address)
