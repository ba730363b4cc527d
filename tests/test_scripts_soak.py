"""scripts/soak.py: a short run against a real engine on few pages, and that it sees what it is there to see."""

import json
import os
import subprocess
import sys

import pytest

from checkpoints import checkpoint
from daemon import SCRIPTS, free_port
from tercet.ipc.answers import Batch, Delta, Failed, Finished, Usage
from tercet.ipc.messages import SamplingParams
from whole_engine import PAGE_SIZE, bytes_of_pages

sys.path.insert(0, str(SCRIPTS))  # scripts are programs: they find each other in their own folder

from soak_footprint import Footprint, growth
from soak_load import Asked, Load, Mix

MIX = Mix(vocab_size=400, longest_prompt=20, longest_output=8)


@pytest.mark.long
def test_200_requests_leave_nothing_behind() -> None:
    command = [sys.executable, str(SCRIPTS / "soak.py"), "--model", str(checkpoint("llama")), "--device", "cpu"]
    command += ["--page-size", str(PAGE_SIZE), "--kv-cache-memory", str(bytes_of_pages("llama", 16))]
    command += ["--max-num-seqs", "12", "--max-num-batched-tokens", "128", "--requests", "200", "--concurrency", "12"]
    command += ["--http", f"127.0.0.1:{free_port()}", "--slow", "4", "--sample-every", "0.5", "--no-log-requests"]
    # torch's CPU products are compiled for each shape and up to 1,024 are kept, half a megabyte each: that has an end,
    # but a short run sees only the growth.
    env = {**os.environ, "LRU_CACHE_CAPACITY": "16", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    reasons = report["reasons"]
    assert report["requests"] == sum(sum(door.values()) for door in reasons.values()) >= 200
    assert {"length", "stop", "cancelled"} == set(reasons["socket"])
    assert {"length", "stop", "left"} == set(reasons["http"])
    assert reasons["slow"]
    assert report["preemptions"] > 0
    assert report["cached_tokens"] > 0
    names = {name.partition(" ")[0] for name in report["resident_mib"]}
    assert names == {"owned_supervisor", "tokenizer", "scheduler", "worker", "http"}


def asked(**changes: object) -> Asked:
    params = SamplingParams(max_tokens=3, stop=("x",))
    return Asked(**{"params": params, "cancel_after": None, "probe": False, **changes})  # type: ignore[arg-type]


def finished(reason: str, *token_ids: int, text: str = "") -> Finished:
    ids = b"".join(token.to_bytes(4, "little") for token in token_ids)
    return Finished("1", text, ids, reason, None, Usage(5, len(token_ids), 0, 0, 0.0, 0.0, 0.0))  # type: ignore[arg-type]


def violations(request: Asked, *items: Delta | Finished | Failed) -> list[str]:
    load = Load("ipc:///tmp/nobody", MIX, 0)
    load._live["1"] = request
    load._take(Batch(items))
    return load.violations


def test_a_good_answer_is_good() -> None:
    assert violations(asked(), Delta("1", "a", b"\1\0\0\0"), Delta("1", "", b"")) == []
    assert violations(asked(), finished("length", 7, 8, 9)) == []
    assert violations(asked(), finished("stop", 7)) == []
    assert violations(asked(cancelled=True), finished("cancelled")) == []


def test_bad_answers_are_seen() -> None:
    (twice,) = violations(asked(), finished("length", 7, 8, 9), finished("length", 7, 8, 9))
    assert twice.startswith("after its end, or never asked: Finished(")
    late = Delta("1", "a", b"")
    assert len(violations(asked(), finished("stop", 7), late)) == 1
    assert violations(asked(), finished("length", 7)) == ["request 1: 1 tokens of 3 and the reason is length"]
    assert violations(asked(), finished("cancelled")) == ["request 1: cancelled by nobody"]
    assert "is in 'axb'" in violations(asked(), finished("stop", 7, text="axb"))[0]
    lost = Finished("1", "", b"", "stop", None, Usage(5, 2, 0, 0, 0.0, 0.0, 0.0))
    assert violations(asked(), lost) == ["request 1: 0 tokens came, usage says 2"]
    assert violations(asked(), Failed("1", "overloaded", "words")) == ["request 1 failed: overloaded: words"]


def test_a_probe_that_changes_is_seen() -> None:
    load = Load("ipc:///tmp/nobody", MIX, 0)
    for token in (7, 7, 8):
        load._live["1"] = asked(probe=True)
        load._take(Batch((finished("stop", token),)))
    assert load.violations == ["request 1: the same greedy request got [8], before [7]"]


def test_what_grows_is_seen() -> None:
    flat = [{"worker 7": Footprint(100 << 20, 20, 9, 4)} for _ in range(20)]
    assert growth(flat) == []
    leaking = [{"worker 7": Footprint((100 + 5 * index) << 20, 20 + index, 9, 4 + index)} for index in range(20)]
    assert growth(leaking) == [
        "worker 7: memory grew from 145 to 195 MiB",
        "worker 7: open files grew from 29 to 39",
        "worker 7: threads grew from 13 to 23",
    ]
    replaced = [*flat[:10], *({"worker 8": Footprint(100 << 20, 20, 9, 4)} for _ in range(10))]
    assert growth(flat[:7]) == ["7 samples tell no growth; want 8 (--sample-every)"]
    assert growth(replaced) == ["the processes were ['worker 7'] and are ['worker 8']"]
