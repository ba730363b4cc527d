"""A worker's step loop: plans and swaps in the order of their messages, each launched as soon as it is there.

Knows what is launched when; what a runner makes of it, and who waits for results, is theirs.
"""

from functools import partial
from typing import NamedTuple

from tercet.engine.beside_steps import BesideSteps
from tercet.engine.child import SupervisorLink
from tercet.engine.step_answers import AnyAnswers
from tercet.engine.step_runner import PageSwaps, StepRunner
from tercet.ipc.sockets import Inbox
from tercet.ipc.step_messages import Draw, ReadWeights, Step, ToWorker
from tercet.ipc.swap_messages import Swap

_LULL_SECONDS = 0.05
"""So long without a plan, and a worker does a little of what starting left for later."""


class Copies(NamedTuple):
    """Of pages and states, beside the steps, and who tells when they are made."""

    swaps: PageSwaps
    answers: AnyAnswers


def run_steps(
    inbox: Inbox[ToWorker],
    runner: StepRunner,
    answers: AnyAnswers,
    link: SupervisorLink,
    beside: BesideSteps,
    copies: Copies | None = None,
) -> None:
    """The step loop. It ends with the process. Plans of an earlier epoch were made for workers that are gone."""
    num_steps, epoch = 0, link.spec.incarnation
    hang = link.spec.config.heartbeat_timeout
    uses_lulls = True
    undrawn: Step | None = None
    while True:
        message = inbox.receive(beside.patience(_LULL_SECONDS if uses_lulls else link.beat_seconds))
        beside.work()
        if message is None and uses_lulls and undrawn is None and not beside.reads_weights:
            uses_lulls = runner.use_lull()
        if message is not None and message.epoch >= epoch:
            epoch = message.epoch
            match message:
                case Step() as step:
                    if copies is not None:
                        copies.swaps.precede(step)
                    runner.begin(step)
                    if step.awaits:
                        answers.tell_midway(step, runner.launch_model())
                    else:
                        for index in range(step.count):
                            answers.put(step, index, runner.launch(index))
                    num_steps += step.count
                    undrawn = step if step.awaits else None
                    if copies is not None and undrawn is None:
                        copies.swaps.follow(step)
                case Draw() as draw:
                    assert undrawn is not None, f"step {draw.step_id} is to draw, and awaits nothing"
                    assert (undrawn.step_id, undrawn.epoch) == (draw.step_id, draw.epoch)
                    if (landing := runner.draw(draw)) is not None:
                        answers.put(undrawn, 0, landing)
                        if copies is not None:
                            copies.swaps.follow(undrawn)
                        undrawn = None
                case Swap() as swap:
                    assert copies is not None, f"swap {swap.number} is to be made, and there is nowhere to copy to"
                    copies.answers.tell_swapped(swap, copies.swaps.make(swap))
                case ReadWeights() as order:
                    beside.reads_weights = True
                    answers.then(partial(beside.read_weights, order))
        if not answers.overdue(hang) and not (copies is not None and copies.answers.overdue(hang)):
            link.beat(num_steps)
