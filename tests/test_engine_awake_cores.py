"""Cores are kept awake while a first token is awaited: when, which, by whom, and never longer than the engine lives."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import anyio
import psutil
import pytest

from engine_children import children
from tercet.engine import core_keeper
from tercet.engine.awake_cores import AwakeCores, has_quota
from tercet.engine.core_keeper import AWAKE, REST, Keeper
from tercet.engine.llm import LLM
from tercet.ipc.client import Client
from tercet.ipc.messages import SamplingParams
from test_engine_planner import Run, settings, submit
from whole_engine import tiny_engine


class Told(AwakeCores):
    """Without a keeper."""

    def __init__(self) -> None:
        super().__init__(kept=False)
        self.words: list[bytes] = []

    def _tell(self, word: bytes) -> None:
        super()._tell(word)
        self.words.append(word)


def test_when() -> None:
    cores = Told()
    for moment, wanted, idle, words in (
        (100.0, False, True, []),
        (100.0, True, False, [AWAKE]),
        (100.9, True, False, [AWAKE]),
        (100.95, False, False, [AWAKE]),  # the token is on its way
        (101.0, False, True, [AWAKE]),  # the next request may be
        (101.06, False, True, [AWAKE, REST]),
        (109.0, False, True, [AWAKE, REST]),
        (110.0, True, False, [AWAKE, REST, AWAKE]),
        (110.3, False, False, [AWAKE, REST, AWAKE]),
        (110.31, False, False, [AWAKE, REST, AWAKE, REST]),  # others decode
        (110.32, False, True, [AWAKE, REST, AWAKE, REST, AWAKE]),  # no more
        (110.5, False, True, [AWAKE, REST, AWAKE, REST, AWAKE, REST]),
    ):
        cores.look(moment, wanted=wanted, idle=idle)
        assert cores.words == words, moment


def test_who_is_owed_a_first_token() -> None:
    run = Run(settings(max_num_batched_tokens=8, run_ahead=1))
    assert not run.planner.is_awaited
    run.planner.submit(submit(1, list(range(1, 13))), 0.0)  # in two chunks
    owed = []
    while not run.planner.idle:
        owed.append(run.planner.is_awaited)
        assert run.plan()
        owed.append(run.planner.is_awaited)
        while run.worker.in_flight:
            run.execute()
    assert owed[:4] == [True] * 4
    assert len(owed) > 4
    assert not any(owed[4:])
    assert len(run.said[1]) == 5


@pytest.mark.parametrize(
    ("groups", "files", "limited"),
    [
        ("0::/\n", {}, False),
        ("0::/\n", {"cpu.max": "max 100000\n"}, False),
        ("0::/\n", {"cpu.max": "400000 100000\n"}, True),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, True),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/c/cpu.max": "50000 100000\n"}, False),
        ("5:cpu,cpuacct:/d\n3:memory:/\n", {"cpu/d/cpu.cfs_quota_us": "-1\n"}, False),
        ("5:cpu,cpuacct:/d\n3:memory:/\n", {"cpu/cpu.cfs_quota_us": "200000\n"}, True),  # a container's view
        ("3:memory:/\n", {"cpu/cpu.cfs_quota_us": "200000\n"}, False),
    ],
)
def test_quotas(tmp_path: Path, groups: str, files: dict[str, str], limited: bool) -> None:
    for name, text in files.items():
        file = tmp_path / "mount" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    tmp_path.joinpath("cgroup").write_text(groups)
    assert has_quota(tmp_path / "cgroup", tmp_path / "mount") == limited
    assert not has_quota(tmp_path / "is not there", tmp_path / "mount")


@pytest.mark.parametrize("more", [False, True])
def test_a_core_each_unless_there_are_very_many(more: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_keeper, "_MOST_CORES", 1 if more else 2)
    cores = set(sorted(os.sched_getaffinity(0))[:2])
    me = psutil.Process()
    before = set(me.children())
    keeper = Keeper(cores)
    processes = set(me.children()) - before
    try:
        wanted = [sorted(cores)] if more else [[core] for core in sorted(cores)]
        assert sorted(one.cpu_affinity() for one in processes) == wanted
        assert {os.getpgid(one.pid) for one in processes} <= {one.pid for one in processes}
        for awake in (False, True, True, False, False, True):
            keeper.keep(awake=awake)
            deadline = time.monotonic() + 5
            while are_awake(processes) != [awake] * len(wanted):  # signals take a moment
                assert time.monotonic() < deadline, are_awake(processes)
                time.sleep(0.01)
    finally:
        for one in processes:
            one.kill()
            one.wait()
    keeper.keep(awake=False)  # nobody is there any more, which harms nobody


def are_awake(processes: Iterable[psutil.Process]) -> list[bool]:
    return [one.status() != psutil.STATUS_STOPPED for one in processes]


def keeper_of(llm: LLM) -> psutil.Process:
    (scheduler,) = children(llm._engine.process.pid, "scheduler")
    (keeper,) = children(scheduler.pid, "core_keeper")
    return keeper


async def until(keeper: psutil.Process, *, kept: bool) -> None:
    with anyio.fail_after(20):
        while are_awake(keeper.children()) != [kept] * min(len(os.sched_getaffinity(0)), 32):
            await anyio.sleep(0.01)


def all_end(family: Iterable[psutil.Process]) -> bool:
    """Of the idle class, they would wait for a core even to end, for as long as a machine is busy."""
    for one in family:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(one.pid, os.SCHED_OTHER, os.sched_param(0))
    return not psutil.wait_procs(family, 10)[1]


async def test_an_engine_keeps_its_cores_awake_and_lets_them_rest() -> None:
    with tiny_engine("qwen3", load_format="null", null_step_ms=300.0, keep_cores_awake=True) as llm:
        keeper = keeper_of(llm)
        async with Client(llm.address) as client, anyio.create_task_group() as tasks:
            await until(keeper, kept=False)
            tasks.start_soon(client.generate, [1, 2, 3], SamplingParams(max_tokens=1))
            await until(keeper, kept=True)
            assert os.sched_getscheduler(keeper.pid) == os.SCHED_IDLE
            assert {os.sched_getscheduler(one.pid) for one in keeper.children()} == {os.SCHED_IDLE}
        async with Client(llm.address) as client, anyio.create_task_group() as tasks:
            tasks.start_soon(client.generate, [1, 2, 3], SamplingParams(max_tokens=20))
            await until(keeper, kept=True)
            await until(keeper, kept=False)  # though it still decodes
            tasks.cancel_scope.cancel()
        family = [keeper, *keeper.children()]
        assert len(family) > 1
    assert all_end(family)


async def test_who_dies_takes_nobody_with_him_and_leaves_nobody_behind() -> None:
    with tiny_engine("qwen3", load_format="null", null_step_ms=50.0, keep_cores_awake=True) as llm:
        async with Client(llm.address) as client:
            await client.generate([1, 2, 3], SamplingParams(max_tokens=1))
            keeper = keeper_of(llm)
            (scheduler,) = children(llm._engine.process.pid, "scheduler")
            family = [keeper, *keeper.children()]
            scheduler.send_signal(signal.SIGKILL)
            await client.generate([1, 2, 3], SamplingParams(max_tokens=1))
            assert all_end(family)

            keeper = keeper_of(llm)
            await until(keeper, kept=False)
            family = [keeper, *keeper.children()]
            keeper.send_signal(signal.SIGKILL)
            assert all_end(family[1:])
            for _ in range(3):
                answer = await client.generate([1, 2, 3], SamplingParams(max_tokens=3))
                assert len(answer.token_ids) == 3


def test_not_unless_a_gpu_computes() -> None:
    with tiny_engine("qwen3", load_format="null") as llm:
        (scheduler,) = children(llm._engine.process.pid, "scheduler")
        assert children(scheduler.pid, "core_keeper") == []
