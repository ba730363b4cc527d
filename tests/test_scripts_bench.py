"""scripts/bench.py: its workloads are what their names say, and a run writes figures that can be trusted."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from checkpoints import checkpoint, tokenizer
from daemon import SCRIPTS, free_port
from families import VOCAB_SIZE

sys.path.insert(0, str(SCRIPTS))  # scripts are programs: they find each other in their own folder

from power_meter import PowerMeter
from workloads import STANDARD, workload


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "bench.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("name", "measure", "prompts", "prompt_length", "outputs"),
    [
        ("bs8_ctx1024", "ms/token", 8, 1024, 258),
        ("bs1_ctx128", "ms/token", 1, 128, 514),
        ("prefill", "prompt tok/s", 16, 8192, 1),
        ("ttft_512", "ms to first token", 1, 512, 1),
        ("turn_8192", "ms to first token", 1, 8192 + 40, 1),
        ("cpu16", "output tok/s", 16, 32, 128),
    ],
)
def test_workloads(name: str, measure: str, prompts: int, prompt_length: int, outputs: int) -> None:
    work = workload(name)
    assert (work.name, work.measure) == (name, measure)
    assert {len(prompt) for prompt in work.prompts} == {prompt_length}
    assert work.output_lengths == [outputs] * prompts == [outputs] * len(work.prompts)
    assert len(set(map(tuple, work.prompts))) == prompts
    assert work.prompts == workload(name).prompts


@pytest.mark.parametrize("name", ["turn_512", "turn_2048", "turn_4096", "turn_8192", "turn_16384", "turn_32768"])
def test_turns_begin_alike(name: str) -> None:
    """What a run has in common with the one before is all that the prefix cache may give it."""
    turn, begun = workload(name), int(name.removeprefix("turn_"))
    (first,), (second,) = turn.prompts_of(0), turn.prompts_of(1)
    assert first[:begun] == second[:begun] == turn.prompts[0][:begun]
    assert first[begun] != second[begun]
    assert len(first) == len(second) == begun + 40
    assert turn.prompts_of(1) == [second]
    alike = workload("ttft_512")
    assert alike.prompts_of(0) == alike.prompts_of(1) == alike.prompts


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_steps_take_a_gpu() -> None:
    done = bench("steps", "--shape", "qwen3-0.6b")
    assert done.returncode == 2
    assert "found no NVIDIA GPU; want one" in done.stderr
    assert "--rows got 0" in bench("steps", "--shape", "qwen3-0.6b", "--rows", "8", "0").stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_steps(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = bench("steps", "--shape", "qwen3-0.6b", "--rows", "1", "64", "--seconds", "1", "--json", str(report))
    assert done.returncode == 0, done.stderr
    one, many = json.loads(report.read_text())["rows"]
    assert one["us"] < many["us"]
    for row in (one, many):
        assert 100 < row["mhz"] < 3000
        assert row["mj"] == pytest.approx(row["us"] * row["watts"] / 1e3, rel=0.3)


def test_a_driver_that_does_not_know_the_card_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimpleNamespace(nvmlInit_v2=lambda: 0, nvmlDeviceGetHandleByUUID=lambda uuid, device: 6)
    monkeypatch.setattr("ctypes.CDLL", lambda name: nvml)
    with pytest.raises(OSError, match="nvmlDeviceGetHandleByUUID returned 6"):
        PowerMeter("a-card")


def test_standard_workloads_exist() -> None:
    assert [workload(name).name for name in STANDARD] == STANDARD
    with pytest.raises(ValueError, match="'bs8' is unknown; want nano256"):
        workload("bs8")


def test_an_offline_run(tmp_path: Path) -> None:
    report, trace = tmp_path / "report.json", tmp_path / "trace.json"
    # Prompts of the workloads name tokens that only a real vocabulary has.
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((checkpoint("smollm2") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 10_001}))
    flags = ["--device", "cpu", "--load-format", "dummy", "--kv-cache-memory", "16MiB", "--max-num-seqs", "8"]
    done = bench("offline", "--model", str(folder), *flags, "cpu1", "--json", str(report), "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    written = json.loads(report.read_text())
    assert "cpu1" in written["command"]
    assert {"python", "torch", "tercet"} <= set(written["environment"])
    start, row = written["rows"]
    assert start["workload"] == "start"
    assert start["figure"] - 1 < sum(start["phases"].values()) <= start["figure"]
    assert (row["engine"], row["workload"], row["measure"]) == ("tercet", "cpu1", "output tok/s")
    assert row["figure"] == pytest.approx(128 / min(row["seconds"][1:]))
    assert f"{row['figure']:.3f} output tok/s" in done.stdout
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    runs = {span["name"]: span["dur"] / 1e6 for span in spans if span["name"].startswith("cpu1")}
    assert runs == {
        f"cpu1 #{repeat}": pytest.approx(seconds, rel=0.01) for repeat, seconds in enumerate(row["seconds"])
    }
    assert sum(span["name"] == "decode" for span in spans) == 127 * len(runs)
    for run in runs:
        assert f"{run}          worker-0 device busy" in done.stdout


def test_planner() -> None:
    done = bench("planner")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert "requests=256" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["offline"], "one of the arguments --model --shape is required"),
        (["offline", "--model", "demo", "nonsense"], "workload 'nonsense' is unknown"),
        (["offline", "--model", "demo", "--engine", "abacus"], "--engine"),
        (["offline", "--model", "demo", "--no-enable-prefix-caching"], "--enable-prefix-caching changes nothing that"),
        (["offline", "--model", "/no/such"], "'/no/such': no such folder or file"),
        (["offline", "--model", "demo", "ttft_5", "turn_5"], "turn_5 is measured with the prefix cache on, ttft_5"),
        (["offline", "--model", "demo", "--engine", "nanovllm", "turn_5"], "of tercet and vllm, not of nanovllm"),
        (["planner", "--json", "/no/such/report.json"], "No such file or directory: '/no/such/report.json'"),
    ],
)
def test_wrong_arguments(arguments: list[str], words: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_both_doors_of_a_paced_null_engine(tmp_path: Path) -> None:
    words = copy.deepcopy(tokenizer(VOCAB_SIZE))
    words.add_tokens([f" word{number}" for number in range(10_000)])
    words.save_pretrained(tmp_path / "model")
    config = json.loads((checkpoint("llama") / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "vocab_size": len(words)}))
    report = tmp_path / "report.json"
    load = ["--streams", "4", "--requests", "8", "--tokens", "40", "--step-ms", "20", "--rounds", "1"]
    where = ["--model", str(tmp_path / "model"), "--http", f"127.0.0.1:{free_port()}"]
    done = bench("doors", *where, *load, "--json", str(report))
    assert done.returncode == 0, done.stderr
    socket, http = json.loads(report.read_text())["rows"]
    for row in (socket, http):
        assert (row["requests"], row["failed"]) == (8, 0)
        assert row["tpot_ms"]["p50"] > 15  # the pace
        assert row["output_tokens_per_s"] * row["seconds"] == pytest.approx(320)
    # Some 50 ms in all where it serves; the kernel counts in steps of 10.
    assert http["cpu_us_per_event"]["http"] > socket["cpu_us_per_event"]["http"]
    assert "tokens/s, median round: socket" in done.stdout


@pytest.mark.long
def test_plain_streams_beside_those_with_a_grammar(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    size = ["--streams", "2", "--beside", "1", "--tokens", "12", "--rounds", "1"]
    where = ["--model", str(checkpoint("llama")), "--device", "cpu"]
    done = bench("structured", *where, *size, "--json", str(report))
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())["rows"]
    assert [row["company"] for row in rows] == ["none", "plain", "grammar"]
    assert [row["beside_tokens_per_s"] > 0 for row in rows] == [False, True, True]
    assert all(row["tokens_per_s"] > 0 for row in rows)
    assert "beside grammar: " in done.stdout


def test_answers_with_a_grammar_and_without(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    size = ["--answers", "1", "3", "--tokens", "9", "--rounds", "1", "--load-format", "dummy"]
    where = ["--model", str(checkpoint("llama")), "--device", "cpu"]
    done = bench("structured", *where, *size, "--json", str(report))
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())["rows"]
    assert [row["answers"] for row in rows] == [1, 3]
    for row in rows:
        for name in ("plain", "grammar"):
            assert row[f"{name}_ms"] * row[f"{name}_tokens_per_s"] == pytest.approx(1e3 * row["answers"])
