"""scripts/bench.py serve: requests come when they should, and every kind of server is heard rightly."""

import argparse
import asyncio
import contextlib
import json
import math
import random
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from checkpoints import checkpoint
from daemon import SCRIPTS, Daemon, free_port

sys.path.insert(0, str(SCRIPTS))  # scripts are programs: they find each other in their own folder

import itertools

from bench_serve import Lengths, arrivals, offer
from serve_report import Timeline
from serve_targets import OpenAITarget

ENGINE = ("--device", "cpu", "--page-size", "16", "--kv-cache-memory", "16MiB", "--max-num-seqs", "8")

# ------------------------------------------------------------------------------------------------- the load


def test_arrivals_are_a_seeded_poisson_process() -> None:
    plan = arrivals(4000, 20.0, Lengths("5:15"), Lengths("exp:40"), 1000, seed=3)
    gaps = [later.at - one.at for one, later in itertools.pairwise(plan)]
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.08)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.08)  # of an exponential: equal to its mean
    assert {len(one.prompt) for one in plan} == set(range(5, 16))
    assert statistics.mean(one.num_tokens for one in plan) == pytest.approx(40, rel=0.08)
    assert min(one.num_tokens for one in plan) == 1
    assert {token // 1000 for one in plan for token in one.prompt} == {0}
    assert plan == arrivals(4000, 20.0, Lengths("5:15"), Lengths("exp:40"), 1000, seed=3)
    assert plan != arrivals(4000, 20.0, Lengths("5:15"), Lengths("exp:40"), 1000, seed=4)
    assert {one.at for one in arrivals(9, math.inf, Lengths("7"), Lengths("7"), 1000, 0)} == {0.0}


def test_arrivals_see_every_phase_of_a_step() -> None:
    period = 0.01
    random_ones = arrivals(200, 30.0, Lengths("5"), Lengths("7"), 1000, seed=4)
    even_ones = arrivals(200, 30.0, Lengths("5"), Lengths("7"), 1000, seed=4, period=period)
    assert even_ones == sorted(even_ones, key=lambda one: one.at)
    for start in range(0, 200, 40):
        phases = sorted(one.at % period / period for one in even_ones[start : start + 40])
        gaps = [later - one for one, later in itertools.pairwise([phases[-1] - 1, *phases])]
        assert max(gaps) < 0.07
    assert max(abs(one.at - even.at) for one, even in zip(random_ones, even_ones, strict=True)) <= period
    assert sorted(one.prompt for one in even_ones) == sorted(one.prompt for one in random_ones)


@pytest.mark.parametrize("text", ["0", "", "5:3", "0:3", "exp:0", "normal:5", "3.5", "-3"])
def test_wrong_lengths(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="want N, LOW:HIGH or exp:MEAN, in tokens"):
        Lengths(text)


async def test_requests_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is sent at its time, on a clock that goes on when what it has come to is done, however long that takes."""
    now = 1000.0
    sleeping: list[tuple[float, asyncio.Event]] = []
    asked: list[tuple[list[int], int]] = []
    gate = asyncio.Event()

    async def sleep(seconds: float) -> None:
        woken = asyncio.Event()
        sleeping.append((now + seconds, woken))
        await woken.wait()

    class Slow:
        async def ask(self, prompt: list[int], num_tokens: int, timeline: Timeline) -> None:
            asked.append((prompt, num_tokens))
            await gate.wait()
            timeline.arrivals.append(timeline.sent + 1.0)

    monkeypatch.setattr("bench_serve.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("bench_serve.asyncio", SimpleNamespace(sleep=sleep, gather=asyncio.gather))
    plan = arrivals(20, 1000.0, Lengths("1:9"), Lengths("1:9"), 1000, 0)
    async with asyncio.timeout(20):
        offering = asyncio.create_task(offer(Slow(), plan))
        while len(sleeping) < 20:
            await asyncio.sleep(0)
        for count, (when, woken) in enumerate(sorted(sleeping, key=lambda one: one[0]), 1):
            now = when
            woken.set()
            while len(asked) < count:
                await asyncio.sleep(0)
        gate.set()
        done = await offering
    assert asked == [(one.prompt, one.num_tokens) for one in plan]
    assert [one.num_prompt for one in done] == [len(one.prompt) for one in plan]
    assert [one.sent - 1000.0 for one in done] == pytest.approx([one.at for one in plan])


# --------------------------------------------------------------------------------------- foreign endpoints

_CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@contextlib.asynccontextmanager
async def endpoint(*writes: bytes, pause: float = 0.0) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that answers each request with these writes."""
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        heard.append(head + await reader.readexactly(length))
        for write in writes:
            writer.write(write)
            await writer.drain()
            await asyncio.sleep(pause)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/v1", heard


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str) -> bytes:
    return event(choices=[{"index": 0, "text": text}])


async def asked(base_url: str, api_key: str | None = None) -> Timeline:
    timeline = Timeline(0.0, 3)
    await OpenAITarget(base_url, "some-model", 0.5, api_key).ask([1, 2, 3], 8, timeline)
    return timeline


async def test_an_openai_stream() -> None:
    body = token("a") + b": a comment\n\n" + token("") + token("b") + token("c")
    body += event(choices=[], usage={"completion_tokens": 8}) + b"data: [DONE]\n\n"
    cut = [body[start : start + 37] for start in range(0, len(body), 37)]  # no chunk ends where an event does
    async with endpoint(_CHUNKED, *(chunk(part) for part in cut), b"0\r\n\r\n", pause=0.01) as (url, heard):
        timeline = await asked(url + "/", "secret")
    assert timeline.error is None
    assert len(timeline.arrivals) == 3
    assert timeline.arrivals == sorted(set(timeline.arrivals))
    assert timeline.num_tokens == 8
    head, _, sent = heard[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret" in head
    assert json.loads(sent) == {
        "model": "some-model", "prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0.5, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


async def test_connections_serve_again_while_they_last() -> None:
    """The second answer says that its connection ends; after the third the server closes without a word."""
    answers = [b"", b"Connection: close\r\n", b"", b""]
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(0)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while answers:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
                connections[-1] += 1
                extra = answers.pop(0)
                head = _CHUNKED[:-2] + extra + b"\r\n"
                writer.write(head + chunk(token("a")) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
                if len(answers) <= 1:
                    break
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        target = OpenAITarget(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", "m", 0.0)
        for _ in range(4):
            timeline = Timeline(0.0, 3)
            await target.ask([1], 1, timeline)
            assert (timeline.error, len(timeline.arrivals)) == (None, 1)
            await asyncio.sleep(0.02)
    assert connections == [2, 1, 1]


async def test_a_stream_that_ends_with_its_connection_and_says_no_usage() -> None:
    plain = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    async with endpoint(plain, token("a"), token("b"), b"data: [DONE]\r\n\r\n") as (url, _):
        timeline = await asked(url)
    assert (timeline.error, timeline.num_tokens) == (None, len(timeline.arrivals))


@pytest.mark.parametrize(
    ("writes", "words"),
    [
        ([b"HTTP/1.1 503 Busy\r\nContent-Length: 9\r\n\r\n", b"too much!"], "ValueError: HTTP 503: too much!"),
        ([_CHUNKED, chunk(token("a")), chunk(event(error={"message": "ill"}))], "ValueError: the endpoint says"),
        ([_CHUNKED, chunk(token("a")), b"0\r\n\r\n"], "EOFError: the answer ended without [DONE]"),
        ([_CHUNKED, chunk(token("a"))[:9]], "EOFError: the connection ended within an answer"),
        ([_CHUNKED[:20]], "EOFError: the connection ended within an answer"),
        ([], "EOFError: the connection ended within an answer"),
        ([b"SSH-2.0\r\n\r\n"], "ValueError: HTTP ?"),
    ],
)
async def test_a_stream_that_goes_wrong(writes: list[bytes], words: str) -> None:
    async with endpoint(*writes) as (url, _):
        timeline = await asked(url)
    assert timeline.error is not None
    assert words in timeline.error


async def test_nobody_there() -> None:
    timeline = await asked(f"http://127.0.0.1:{free_port()}/v1")
    assert timeline.error is not None
    assert "Connect" in timeline.error
    with pytest.raises(ValueError, match=r"'127\.0\.0\.1:80'; want http://HOST:PORT/v1"):
        OpenAITarget("127.0.0.1:80", "m", 0.0)


# ------------------------------------------------------------------------------------------ real engines


def serve_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "bench.py"), "serve", "--vocabulary", "400", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_our_socket_and_our_http_door(tmp_path: Path) -> None:
    load = ["--requests", "12", "--rate", "50", "--prompt-tokens", "5:40", "--output-tokens", "2:9"]
    expected = arrivals(12, 50, Lengths("5:40"), Lengths("2:9"), 400, 0)
    with Daemon(str(checkpoint("llama")), *ENGINE, "--http", f"127.0.0.1:{free_port()}") as daemon:
        url = daemon.ready.split("http=")[1].split()[0]
        for where in (["--address", daemon.address], ["--base-url", f"{url}/v1", "--api-key=not-to-be-told"]):
            file = tmp_path / "report.json"
            done = serve_bench(*where, *load, "--slo-ttft-ms", "1e6", "--json", str(file))
            assert done.returncode == 0, done.stderr
            written = json.loads(file.read_text())
            assert "--requests 12" in written["command"]
            assert "not-to-be-told" not in file.read_text()
            (report,) = written["rows"]
            assert (report["requests"], report["failed"]) == (12, 0)
            tokens = report["output_tokens_per_s"] * report["seconds"]
            assert tokens == pytest.approx(sum(one.num_tokens for one in expected))
            assert report["good_share"] == 1.0
            assert 0 < report["ttft_ms"]["p50"] <= report["e2e_ms"]["p50"]
            assert "goodput" in done.stdout
        refused = serve_bench("--address", daemon.address, "--prompt-tokens", "600", "--requests", "2")
    assert refused.returncode == 2
    assert "the first request failed: prompt_too_long" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_warming_up_leaves_something_to_count() -> None:
    done = serve_bench("--address", "ipc:///nowhere", "--requests", "3", "--warm-up", "3")
    assert done.returncode == 2
    assert "--warm-up 3; want less than --requests 3" in done.stderr


async def test_arrivals_are_when_bytes_came_not_when_there_was_time_for_them() -> None:
    """What came in one read has one time."""
    body = b"".join(chunk(token(text)) for text in "abc")
    async with endpoint(_CHUNKED, body, chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", pause=0.05) as (url, _):
        timeline = await asked(url)
    assert timeline.error is None
    assert len(timeline.arrivals) == 3
    assert len(set(timeline.arrivals)) == 1


def test_nobody_at_the_socket() -> None:
    done = serve_bench("--base-url", f"http://127.0.0.1:{free_port()}/v1", "--model", "m")
    assert done.returncode == 2
    assert "the first request failed: ConnectionRefusedError" in done.stderr
    assert "Traceback" not in done.stderr


def test_random_is_not_the_same_everywhere() -> None:
    rng = random.Random(1)
    assert len({Lengths("exp:1000").draw(rng) for _ in range(50)}) > 40
