"""Leases: as many steps as hide a message's way, so that a new prompt does not wait for many slow ones."""

import asyncio
from pathlib import Path

import pytest

from tercet.engine.lease import Lease
from tercet.engine.trace import Span, read_lane
from tercet.ipc.client import Client
from tercet.ipc.messages import SamplingParams
from whole_engine import tiny_engine


def after(lease: Lease, *intervals: float, is_decode: bool = True) -> int:
    now = 100.0
    lease.completed(now, is_decode=is_decode, more_in_flight=True)
    for interval in intervals:
        now += interval
        lease.completed(now, is_decode=is_decode, more_in_flight=True)
    return lease.steps


@pytest.mark.parametrize(
    ("step_ms", "steps"), [(0.0, 8), (0.1, 8), (0.25, 8), (0.26, 8), (0.3, 7), (0.7, 3), (1.1, 2), (2.1, 1), (500.0, 1)]
)
def test_about_two_milliseconds_of_steps_and_one_at_least(step_ms: float, steps: int) -> None:
    assert after(Lease(8, 0.002), *[step_ms / 1e3] * 20) == steps


def test_the_most_until_something_is_known() -> None:
    assert Lease(8, 0.002).steps == 8
    assert after(Lease(8, 0.0), 0.0) == 8
    assert after(Lease(8, 0.0), 0.001) == 1


def test_steps_taken_together_and_a_change_of_pace() -> None:
    lease = Lease(8, 0.002)
    assert after(lease, *[0.0, 0.0, 0.0, 0.004] * 2) == 2  # four at once each time the scheduler looks
    assert after(lease, *[0.01] * 8) == 1
    assert after(lease, *[0.0005] * 8) == 4


def test_prompts_and_pauses_are_not_decode_steps() -> None:
    lease = Lease(8, 0.002)
    assert after(lease, *[1.0] * 10, is_decode=False) == 8
    lease = Lease(8, 0.002)  # and nobody asks for anything between two steps
    lease.completed(200.0, is_decode=True, more_in_flight=False)
    lease.completed(300.0, is_decode=True, more_in_flight=True)
    assert lease.steps == 8


def test_a_new_prompt_enters_behind_the_steps_in_flight(tmp_path: Path) -> None:
    """Whatever a step takes here: with leases of one step, two plans of it are in flight; else twice eight steps."""

    async def ask(address: str) -> None:
        params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
        num_tokens, second = 0, None
        async with Client(address) as client:
            async for piece in client.stream([5] * 20, params):
                num_tokens += len(piece.token_ids)
                if second is None and num_tokens > 40:
                    second = asyncio.ensure_future(client.generate([6] * 20, params))
            assert second is not None
            await second

    waited = {}
    for name, limit in (("short", 1e-6), ("long", 1e6)):
        folder = tmp_path / name
        with tiny_engine("llama", trace_dir=str(folder), run_ahead=2, max_lease=8, max_lease_ms=limit) as llm:
            asyncio.run(ask(llm.address))
        (hear,) = (
            record
            for record in read_lane(next(folder.glob("scheduler.loop.*")))
            if record.span is Span.TAKE_SUBMIT and record.number == 2
        )
        steps = read_lane(next(folder.glob("worker-0.device.*")))
        entered = next(step for step in steps if step.span is Span.PREFILL and step.begin_ns > hear.begin_ns)
        waited[name] = sum(hear.begin_ns < step.begin_ns < entered.begin_ns for step in steps)
    assert waited["short"] <= 2
    assert 2 < waited["long"] <= 16
