"""Cores stay awake while a first token is awaited: what is asked of Linux, when, and by whom."""

import os
from pathlib import Path
from typing import Any

import anyio
import pytest

from engine_children import children
from tercet.engine import awake_cores
from tercet.engine.awake_cores import AwakeCores
from tercet.ipc.client import Client
from tercet.ipc.messages import SamplingParams
from test_engine_planner import Run, settings, submit
from whole_engine import tiny_engine

ANY = 2_000_000_000


def written(file: Path) -> list[int]:
    wishes = file.read_bytes()
    return [int.from_bytes(wishes[place : place + 4], "little") for place in range(0, len(wishes), 4)]


@pytest.mark.parametrize(("driver", "least"), [("haltpoll\n", 0), ("intel_idle\n", 1), (None, 1)])
def test_what_is_asked_for(tmp_path: Path, driver: str | None, least: int) -> None:
    """A virtual core says of a sleep of 50 us that it costs 1, so it is not to sleep at all."""
    file = tmp_path / "cpu_dma_latency"
    file.touch()
    if driver is not None:
        (tmp_path / "driver").write_text(driver)
    cores = AwakeCores(file, tmp_path / "driver")
    cores.look(100.0, wanted=False)
    assert written(file) == []
    for moment, wanted, wishes in (
        (100.0, True, [least]),
        (100.9, True, [least]),
        (100.95, False, [least]),  # the answer is on its way, or the next request
        (101.05, False, [least, ANY]),
        (109.0, False, [least, ANY]),
        (110.0, True, [least, ANY, least]),
    ):
        cores.look(moment, wanted=wanted)
        assert written(file) == wishes, moment


def test_nothing_is_asked_where_that_is_not_allowed(tmp_path: Path) -> None:
    for file in (None, tmp_path / "is not there", tmp_path):
        cores = AwakeCores(file)
        cores.look(1.0, wanted=True)
        cores.look(2.0, wanted=False)
    assert list(tmp_path.iterdir()) == []


def test_who_is_owed_a_first_token() -> None:
    run = Run(settings(max_num_batched_tokens=8, run_ahead=1))
    assert not run.planner.owes_first_tokens
    run.planner.submit(submit(1, list(range(1, 13))), 0.0)  # in two chunks
    owed = []
    while not run.planner.idle:
        owed.append(run.planner.owes_first_tokens)
        assert run.plan()
        owed.append(run.planner.owes_first_tokens)
        while run.worker.in_flight:
            run.execute()
    assert owed[:4] == [True] * 4
    assert len(owed) > 4
    assert not any(owed[4:])
    assert len(run.said[1]) == 5


@pytest.mark.skipif(not os.access(awake_cores.FILE, os.R_OK | os.W_OK), reason="only root may ask that of Linux")
@pytest.mark.parametrize("let_cores_sleep", [False, True])
async def test_an_engine_asks(let_cores_sleep: bool) -> None:
    options: dict[str, Any] = {"load_format": "null", "null_step_ms": 300.0, "let_cores_sleep": let_cores_sleep}
    with tiny_engine("qwen3", **options) as llm:
        (scheduler,) = children(llm._engine.process.pid, "scheduler")
        files = [Path(one).resolve() for one in Path(f"/proc/{scheduler.pid}/fd").iterdir()]
        assert (awake_cores.FILE in files) != let_cores_sleep
        if let_cores_sleep:
            return
        async with Client(llm.address) as client, anyio.create_task_group() as tasks:
            tasks.start_soon(client.generate, [1, 2, 3], SamplingParams(max_tokens=1))
            with anyio.fail_after(10):
                while int.from_bytes(awake_cores.FILE.read_bytes()[:4], "little") > 1:
                    await anyio.sleep(0.01)
