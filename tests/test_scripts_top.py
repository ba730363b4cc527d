"""scripts/top.py against a live engine, through both of its doors."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from checkpoints import checkpoint
from daemon import SCRIPTS, Daemon, free_port
from engine_children import children
from top import picture


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "top.py"), *arguments, "--once", "--interval", "0.3"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_both_doors() -> None:
    listen_key = "one thousand and one nights of it"
    flags = ["--device", "cpu", "--kv-cache-memory", "8MiB", "--api-key", "open-sesame", "--listen-key", listen_key]
    with Daemon(str(checkpoint("llama")), *flags, "--http", f"127.0.0.1:{free_port()}") as daemon:
        headers = {"authorization": "Bearer open-sesame"}
        body = {"prompt": "the cat " * 40, "max_tokens": 5}
        for _ in range(2):
            assert httpx.post(f"{daemon.http}/v1/completions", json=body, headers=headers).is_success
        for door in (daemon.http, daemon.address):
            done = top(door, "--api-key", "open-sesame", "--listen-key", listen_key)
            assert (done.returncode, done.stderr) == (0, "")
            lines = done.stdout.splitlines()
            assert lines[:2] == [door, "requests      0 running, 0 waiting"]
            assert re.match(r"KV cache      █*·+ \d\.\d%", lines[2])
            assert re.search(r"^steps +\d+ /s$", done.stdout, re.MULTILINE)
            assert re.search(r"^prefix hits +\d\d% of \d+ prompt tokens$", done.stdout, re.MULTILINE)
            assert ("generated" in done.stdout) == door.startswith("http")
            if door.startswith("http"):
                loads = re.findall(r"^(\S.*\S) +\d+% of a core, ([\d,]+) MiB$", done.stdout, re.MULTILINE)
                assert [name for name, _ in loads] == ["supervisor", "worker 0", "scheduler", "tokenizer", "http"]
                (worker,) = children(daemon.process.pid, "worker")
                shown = int(dict(loads)["worker 0"].replace(",", ""))
                assert shown == pytest.approx(worker.memory_info().rss / 2**20, rel=0.2)
        done = top(daemon.http, "--api-key", "wrong-wrong")
        assert (done.returncode, done.stdout) == (1, "")
        assert "401" in done.stderr


def watching(door: str) -> subprocess.Popen[str]:
    """It has shown something."""
    command = [sys.executable, str(SCRIPTS / "top.py"), door, "--interval", "0.01"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert door in process.stdout.readline()
    return process


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code, and what it complains of."""
    said = process.communicate(timeout=30)[1]
    return process.returncode, said


@pytest.mark.long
def test_how_it_ends(ids_only_model: Path, tmp_path: Path) -> None:
    """By Ctrl-C and without a reader, of which nobody needs to be told; with the engine, in a line."""
    doors = ["--http", f"127.0.0.1:{free_port()}", "--listen", f"ipc://{tmp_path}/front"]
    with Daemon(str(ids_only_model), "--load-format", "null", *doors) as daemon:
        for door in (daemon.http, daemon.address):
            interrupted = watching(door)
            interrupted.send_signal(signal.SIGINT)
            assert end(interrupted) == (0, "")
            unread = watching(door)
            assert unread.stdout is not None
            unread.stdout.close()
            assert unread.stderr is not None
            assert (unread.wait(30), unread.stderr.read()) == (0, "")
            unread.stderr.close()
        left = [watching(door) for door in (daemon.http, daemon.address)]
    for process, door in zip(left, (daemon.http, daemon.address), strict=True):
        code, said = end(process)
        assert code == 1
        assert re.fullmatch(f"tercet: {door}: .+\n", said)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", b"no HTTP\r\n", b""])
def test_an_answer_cut_short(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(30)
        url = f"http://127.0.0.1:{door.getsockname()[1]}"
        command = [sys.executable, str(SCRIPTS / "top.py"), url]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        connection, _ = door.accept()
        with connection:
            connection.recv(2**16)
            connection.sendall(answer)
        code, said = end(process)
    assert code == 1
    assert re.fullmatch(f"tercet: {url}: .+\n", said)


def test_a_disk_that_is_full(ids_only_model: Path) -> None:
    with Daemon(str(ids_only_model), "--load-format", "null") as daemon, open("/dev/full", "w") as full:
        command = [sys.executable, str(SCRIPTS / "top.py"), daemon.address, "--once", "--interval", "0.01"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "nothing can be shown: No space left on device" in done.stderr


GAUGES = {
    "num_requests_running": 1,
    "num_requests_waiting": 0,
    "kv_cache_usage_perc": 0.5,
    "num_preemptions_total": 0,
    "prefix_cache_queries_total": 0,
    "prefix_cache_hits_total": 0,
}


def test_processes_that_are_replaced_between_two_readings() -> None:
    """The engine did not answer the first time; or its scheduler and the door count from nothing again."""
    now = {**GAUGES, "steps_total": 50, "generation_tokens_total": 900, "request_queue_time_seconds_count": 2}
    now["request_queue_time_seconds_sum"] = 0.5
    silent = {"engine_up": 0.0, "generation_tokens_total": 500}
    assert list(picture(now, silent, 2.0))[2:] == ["generated     200 tok/s"]
    old = {**now, "steps_total": 70, "generation_tokens_total": 5000, "request_queue_time_seconds_count": 9}
    assert len(list(picture(now, old, 2.0))) == 2
    earlier = {**now, "steps_total": 10, "request_queue_time_seconds_count": 1, "request_queue_time_seconds_sum": 0.2}
    lines = list(picture(now, earlier, 2.0))[2:]
    assert lines == ["generated     0 tok/s", "steps         20 /s", "in the queue  300.0 ms on average"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["127.0.0.1:8000"], 2, "want http://HOST:PORT, ipc://PATH or tcp://HOST:PORT"),
        (["http://127.0.0.1:1"], 1, "refused"),
    ],
)
def test_wrong_addresses(arguments: list[str], code: int, words: str) -> None:
    done = top(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
