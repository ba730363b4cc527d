"""Engines of several replicas whose workers compute nothing: doors, gauges, ends, requests that kill."""

import asyncio
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from daemon import Daemon, free_port
from engine_children import children, is_alive
from null_daemon import eventually
from tercet.engine.config import EngineConfig
from tercet.engine.engine_process import EngineProcess
from tercet.ipc.client import Client, RequestRefused
from tercet.ipc.messages import SamplingParams
from test_scripts_top import top

NULL = ("--load-format", "null", "--data-parallel-size", "2")


def workers(supervisor: int) -> list[psutil.Process]:
    """In the order of their replicas."""
    return sorted(children(supervisor, "worker"), key=lambda one: str(one.cmdline()[-1]))


def status(daemon: Daemon, path: str = "/health/ready") -> int:
    return httpx.get(daemon.http + path).status_code


def gauge(daemon: Daemon, name: str) -> dict[str, float]:
    """By the replica's label; under an empty one, where it has none."""
    families = text_string_to_metric_families(httpx.get(f"{daemon.http}/metrics").text)
    samples = [one for family in families for one in family.samples if one.name == name]
    assert samples
    return {one.labels.get("engine", ""): one.value for one in samples}


def test_the_http_door(ids_only_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Gauges of each replica; ready as long as one is whole; what dies is called by its replica."""
    with Daemon(str(ids_only_model), *NULL, "--http", f"127.0.0.1:{free_port()}") as daemon:
        body = {"prompt": [1, 2, 3], "max_tokens": 5}
        for _ in range(4):
            assert httpx.post(f"{daemon.http}/v1/completions", json=body).is_success
        eventually(lambda: gauge(daemon, "tercet:prefix_cache_queries_total") == {"0": 6, "1": 6}, "two each")
        assert gauge(daemon, "vllm:num_requests_running") == {"0": 0, "1": 0}
        assert gauge(daemon, "vllm:kv_cache_usage_perc") == {"0": 0, "1": 0}
        assert gauge(daemon, "vllm:prompt_tokens_total") == {"": 12}
        assert gauge(daemon, "tercet:e2e_request_latency_seconds_count") == {"": 4}
        for door in (daemon.http, daemon.address):
            lines = top(door).stdout.splitlines()
            assert lines[1] == "requests      0 running, 0 waiting"
            assert [line for line in lines if re.match(r"replica \d  ", line)] == [
                f"replica {replica}     0 running, 0 waiting, 0.0% of the KV cache" for replica in range(2)
            ]
            assert ("replica 1 worker 0" in "".join(lines)) == door.startswith("http")
        first, second = workers(daemon.process.pid)
        second.kill()
        eventually(lambda: len(workers(daemon.process.pid)) == 1, "it has died")
        assert status(daemon) == 200
        eventually(lambda: len(workers(daemon.process.pid)) == 2, "it is back")
        assert status(daemon) == 200
        for one in workers(daemon.process.pid):
            one.kill()
        eventually(lambda: status(daemon) == 503, "no replica is whole")
        eventually(lambda: status(daemon) == 200, "one is")
        assert httpx.post(f"{daemon.http}/v1/completions", json=body).is_success
        assert not is_alive(first)
    said = capfd.readouterr().err
    assert "tercet: replica 1 worker 0 was killed by SIGKILL; starting it again" in said
    assert "tercet: replica 0 worker 0 is back" in said


async def test_told_to_end_it_finishes_what_runs_in_all(ids_only_model: Path, tmp_path: Path) -> None:
    """Also what a replica has that loses its scheduler meanwhile."""
    flags = (*NULL, "--null-step-ms", "5", "--listen", f"ipc://{tmp_path}/engine")
    with Daemon(str(ids_only_model), *flags) as daemon:
        async with Client(daemon.address) as client:

            async def answer(begun: asyncio.Event) -> int:
                count = 0
                async for piece in client.stream([1, 2, 3], SamplingParams(max_tokens=400, ignore_eos=True)):
                    count += len(piece.token_ids)
                    begun.set()
                return count

            beginnings = [asyncio.Event() for _ in range(4)]
            answers = [asyncio.create_task(answer(begun)) for begun in beginnings]
            for begun in beginnings:
                await asyncio.wait_for(begun.wait(), 20)
            daemon.process.send_signal(signal.SIGTERM)
            children(daemon.process.pid, "scheduler")[1].kill()
            assert await asyncio.wait_for(asyncio.gather(*answers), 30) == [400] * 4
        assert await asyncio.to_thread(daemon.process.wait, 20) == 0


def test_one_that_always_dies_ends_the_engine(ids_only_model: Path) -> None:
    """As it would alone; deaths of the other do not count."""
    config = EngineConfig(model=str(ids_only_model), load_format="null", data_parallel_size=2, max_restarts=2)
    with EngineProcess(config) as engine:
        deadline = time.monotonic() + 30
        for replica in (0, 0, 1, 1, 1):
            (victim,) = wait_for(lambda at=replica: workers_of(engine.process.pid, at), deadline)  # type: ignore[misc]
            victim.kill()
            victim.wait(10)
        engine.process.wait(20)
        assert engine.process.returncode == 1
        while engine.death is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "replica 1 worker 0 was killed by SIGKILL; it died 3 times within 60 s" in engine.death


def workers_of(supervisor: int, replica: int) -> list[psutil.Process]:
    return [one for one in children(supervisor, "worker") if one.cmdline()[-1].startswith(f"replica {replica} ")]


def wait_for(look: Callable[[], list[psutil.Process]], deadline: float) -> list[psutil.Process]:
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


@pytest.fixture
def poisoned(ids_only_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineProcess]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "poison"), prepend=":")
    config = EngineConfig(model=str(ids_only_model), load_format="null", data_parallel_size=2, max_restarts=3)
    with EngineProcess(config) as engine:
        yield engine


async def test_what_has_killed_one_replica_is_not_tried_on_the_next(poisoned: EngineProcess) -> None:
    """And who runs elsewhere, or comes meanwhile, notices nothing."""

    async def innocents(client: Client) -> None:
        for _ in range(3):
            asked = [client.generate([1] * length, SamplingParams(max_tokens=300)) for length in (1, 101, 201, 301)]
            for start, answer in zip((1, 101, 201, 301), await asyncio.gather(*asked), strict=True):
                assert answer.token_ids == [1000 + (start + i) % 500 for i in range(300)]

    before = set(workers(poisoned.process.pid))
    async with Client(poisoned.address) as client:
        beside = asyncio.create_task(innocents(client))
        with pytest.raises(RequestRefused, match="died twice while they computed this request"):
            await client.generate([5, 6660], SamplingParams(max_tokens=5))
        for _ in range(4):  # each replica's turn would come
            with pytest.raises(RequestRefused, match="not tried again before 60 s"):
                await client.generate([5, 6660], SamplingParams(max_tokens=5))
        await beside
    assert len(before & set(workers(poisoned.process.pid))) == 1


def test_records_are_told_apart(ids_only_model: Path, tmp_path: Path) -> None:
    config = EngineConfig(model=str(ids_only_model), load_format="null", data_parallel_size=2, trace_dir=str(tmp_path))
    with EngineProcess(config):
        pass
    lanes = {path.name.split(".")[0] for path in tmp_path.iterdir()}
    assert lanes == {"tokenizer", "scheduler-0", "scheduler-1", "worker-0-0", "worker-1-0"}
