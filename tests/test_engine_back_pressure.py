"""Bounded queues, deadlines and priorities of a whole engine whose worker computes nothing, and takes its time."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raw_client import RawClient
from tercet.engine.config import EngineConfig
from tercet.engine.engine_process import EngineProcess
from tercet.ipc.client import Client, Overloaded, RequestTimedOut
from tercet.ipc.messages import SamplingParams
from whole_engine import info, wait_until_empty

STEP_MS = 5.0
LONG = SamplingParams(max_tokens=8000, ignore_eos=True)
"""Holds its slot for 40 s: until it is cancelled, however slowly a test gets on."""
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(ids_only_model: Path) -> Iterator[EngineProcess]:
    """One request runs, three wait."""
    config = EngineConfig(
        model=str(ids_only_model),
        load_format="null",
        null_step_ms=STEP_MS,
        max_num_seqs=1,
        max_queued_requests=3,
        max_queued_tokens=100,
        max_lease=1,
    )
    with EngineProcess(config) as engine:
        yield engine


async def settled(engine: EngineProcess, num_waiting: int) -> None:
    """Until so many wait behind one that runs."""
    while True:
        gauges = await asyncio.to_thread(info, engine.address)
        if (gauges.num_running, gauges.num_waiting) == (1, num_waiting):
            return
        await asyncio.sleep(0.02)


async def end_all(engine: EngineProcess, *tasks: "asyncio.Task[object]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(wait_until_empty, engine.address)


async def test_a_full_queue_says_when_to_come_back(engine: EngineProcess) -> None:
    async with Client(engine.address) as client:
        tasks = [asyncio.ensure_future(client.generate([1], LONG)) for _ in range(4)]
        await settled(engine, 3)
        with pytest.raises(
            Overloaded, match=r"3 requests with 3 tokens wait already \(--max-queued-requests"
        ) as caught:
            await client.generate([1], SHORT)
        assert caught.value.retry_after is not None
        assert 1 <= caught.value.retry_after <= 60
        tasks.pop().cancel()
        await settled(engine, 2)
        tasks.append(asyncio.ensure_future(client.generate([1], SHORT)))
        await settled(engine, 3)
        await end_all(engine, *tasks)


async def test_a_queue_is_full_of_tokens_too(engine: EngineProcess) -> None:
    async with Client(engine.address) as client:
        tasks = [asyncio.ensure_future(client.generate([1], LONG))]
        await settled(engine, 0)
        # One alone may be longer than the bound: it would never be served otherwise.
        tasks.append(asyncio.ensure_future(client.generate([1] * 150, SHORT)))
        await settled(engine, 1)
        with pytest.raises(Overloaded, match="150 tokens wait already"):
            await client.generate([1], SHORT)
        await end_all(engine, *tasks)


async def test_a_request_that_waits_too_long_is_told(engine: EngineProcess) -> None:
    async with Client(engine.address) as client:
        running = asyncio.ensure_future(client.generate([1], LONG))
        await settled(engine, 0)
        began = time.monotonic()
        with pytest.raises(RequestTimedOut, match=r"waited for its turn for queue_timeout, 0\.4 s"):
            await client.generate([1], SHORT, queue_timeout=0.4)
        assert 0.4 <= time.monotonic() - began < 5
        assert not running.done()
        await end_all(engine, running)
        # Who is served at once is not told, however long it takes then: here a hundred times as long.
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        began = time.monotonic()
        assert len((await client.generate([1], params, queue_timeout=0.01)).token_ids) == 200
        assert time.monotonic() - began > 0.9 * 200 * STEP_MS / 1e3


async def test_a_request_has_its_time_and_no_more(engine: EngineProcess) -> None:
    with RawClient(engine.address) as raw:
        await asyncio.to_thread(raw.ask, "GenerateIds", "a", b"\1\0\0\0", {"max_tokens": 8000}, "", {"timeout": 0.3})
        items = await asyncio.to_thread(lambda: list(end_of(raw)))
    assert [item[0] for item in items[:-1]] == ["Delta"] * (len(items) - 1)
    assert items[-1] == ["Failed", "a", "timed_out", "the request had its timeout, 0.3 s", None]
    await end_all(engine)


def end_of(raw: RawClient) -> Iterator[list[object]]:
    for item in raw.items():
        yield item
        if item[0] != "Delta":
            return


async def test_the_urgent_go_first(engine: EngineProcess) -> None:
    order: list[int] = []

    async def ask(client: Client, priority: int) -> None:
        await client.generate([1], SHORT, priority=priority)
        order.append(priority)

    async with Client(engine.address) as client:
        running = asyncio.ensure_future(client.generate([1], LONG))
        await settled(engine, 0)
        tasks = []
        for count, priority in enumerate((5, 0, -7)):
            tasks.append(asyncio.ensure_future(ask(client, priority)))
            await settled(engine, count + 1)
        running.cancel()
        await asyncio.gather(*tasks)
    assert order == [-7, 0, 5]
