"""What a real engine records of itself: every lane, spans in order and nested, and a device as busy as it was."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from covering import long
from daemon import SCRIPTS
from engine_children import children
from tercet.engine.errors import StartupFailed
from tercet.engine.trace import Record, Span, open_lanes, read_lane
from tercet.ipc.client import Client
from tercet.ipc.messages import SamplingParams
from whole_engine import generate, tiny_engine

sys.path.insert(0, str(SCRIPTS))  # scripts are programs: they find each other in their own folder

from trace_file import RecordedLane, chrome_trace, read_lanes, steady_decode
from trace_hops import HOPS, first_token_hops
from trace_picture import picture

NUM_TOKENS = 60
NUM_REQUESTS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of an engine that has answered some prompts and was then killed."""
    folder = tmp_path_factory.mktemp("trace") / "made" / "by the engine"
    begin_ns = time.monotonic_ns()
    with tiny_engine("llama", trace_dir=str(folder), max_num_batched_tokens=64, max_num_seqs=8) as llm:
        prompts = [[5 + index] * 50 for index in range(NUM_REQUESTS)]
        generate(llm, prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True))
    (folder / "times").write_text(f"{begin_ns} {time.monotonic_ns()}")
    return folder


def lane(folder: Path, process: str, name: str) -> list[Record]:
    (records,) = (one.records for one in read_lanes(folder) if (one.process, one.lane) == (process, name))
    return records


def test_every_lane_is_there_within_the_time_of_the_run(folder: Path) -> None:
    begin_ns, end_ns = map(int, (folder / "times").read_text().split())
    lanes = read_lanes(folder)
    names = [(one.process, one.lane) for one in lanes if one.lane != "garbage"]
    expected = {("tokenizer", "loop"), ("scheduler", "loop")} | {
        ("worker-0", name) for name in ("launch", "device", "answers")
    }
    assert set(names) == expected
    assert len(names) == len(expected)
    assert [process[0] for process, _ in names] == list("tswww")
    for one in lanes:
        for record in one.records:
            assert begin_ns < record.begin_ns <= record.end_ns < end_ns


def test_spans_are_nested_or_apart(folder: Path) -> None:
    for one in read_lanes(folder):
        open_until: list[int] = []
        for record in one.records:
            while open_until and open_until[-1] <= record.begin_ns:
                open_until.pop()
            assert not open_until or record.end_ns <= open_until[-1], (one.process, one.lane, record)
            open_until.append(record.end_ns)


def test_a_step_is_planned_then_begun_then_computed_then_taken(folder: Path) -> None:
    def by_number(process: str, name: str, *spans: Span) -> dict[int, Record]:
        return {record.number: record for record in lane(folder, process, name) if record.span in spans}

    plans = by_number("scheduler", "loop", Span.PLAN)
    begun = by_number("worker-0", "launch", Span.BEGIN)
    computed = by_number("worker-0", "device", Span.DECODE, Span.PREFILL)
    taken = by_number("scheduler", "loop", Span.TAKE_SAMPLED)
    assert set(plans) == set(begun) == set(computed) == set(taken)
    assert sorted(plans) == list(range(len(plans)))
    for number in plans:
        times = [plans[number].begin_ns, begun[number].begin_ns, computed[number].begin_ns, taken[number].end_ns]
        assert times == sorted(times)


def test_steps_are_what_the_requests_needed(folder: Path) -> None:
    steps = lane(folder, "worker-0", "device")
    prefills = [step for step in steps if step.span is Span.PREFILL]
    assert len(prefills) >= NUM_REQUESTS * 50 // 64
    # Every token but each request's first, which comes out of its last prefill step, takes a row of a decode.
    assert sum(step.detail for step in steps) >= NUM_REQUESTS * NUM_TOKENS
    assert {record.number for record in lane(folder, "scheduler", "loop") if record.span is Span.TAKE_SUBMIT} == set(
        range(1, NUM_REQUESTS + 1)
    )
    heard = [record.number for record in lane(folder, "tokenizer", "loop") if record.span is Span.HEAR]
    assert sorted(heard)[-NUM_REQUESTS:] == list(range(1, NUM_REQUESTS + 1))


def test_the_chrome_trace_and_the_picture(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    command = [sys.executable, str(SCRIPTS / "bench.py"), "trace", str(folder), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "worker-0 device busy" in done.stdout
    trace = json.loads(file.read_text())
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M" and "name" in event["args"]}
    assert {"tokenizer", "scheduler", "worker-0", "loop", "launch", "device", "answers"} <= names
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert min(span["ts"] for span in spans) == 0
    assert len(spans) == sum(len(one.records) for one in read_lanes(folder))
    drawn = picture(trace, 0, max(span["ts"] for span in spans) / 1e3 + 1)
    assert drawn.count("<title>") == len(spans)
    assert "worker-0 device" in drawn
    with pytest.raises(ValueError, match="nothing happened between 900000 and"):
        picture(trace, 900_000, 1)


def test_busy_share_of_known_spans() -> None:
    ms = 1_000_000
    steps = [Record(0, 50 * ms, 0, 1, Span.PREFILL)]
    steps += [Record((100 + 10 * i) * ms, (109 + 10 * i) * ms, i, 1, Span.DECODE) for i in range(101)]
    steps += [Record(5000 * ms, 5001 * ms, 0, 1, Span.PREFILL)]  # the time without requests is no bubble
    steps += [Record((6000 + 10 * i) * ms, (6000 + 10 * i + 20) * ms, i, 1, Span.DECODE) for i in range(3)]  # too few
    busy = steady_decode(steps)
    assert (busy.steps, busy.busy_ns, busy.total_ns) == (100, 900 * ms, 1000 * ms)
    assert busy.share == 0.9
    assert busy.bubbles_ns == [ms] * 100
    overlapping = [Record(i * ms, (i + 2) * ms, i, 1, Span.DECODE) for i in range(40)]
    assert steady_decode(overlapping).share == 1.0
    assert steady_decode([]).share == 0.0


def test_first_token_hops_of_known_spans() -> None:
    """Before the client's first run, then alone within that, then two together: only those alone count."""

    def request(number: int, step: int, at: int) -> dict[tuple[str, str], list[Record]]:
        def span(kind: Span, begin: int, end: int, number: int) -> Record:
            return Record(1000 * (at + begin), 1000 * (at + end), number, 0, kind)

        return {
            ("tokenizer", "loop"): [span(Span.HEAR, 1, 3, number), span(Span.SPEAK, 105, 119, 1)],
            ("scheduler", "loop"): [
                span(Span.TAKE_SUBMIT, 6, 10, number),
                span(Span.PLAN, 10, 15, step),
                span(Span.TAKE_SAMPLED, 78, 91, step),
            ],
            ("worker-0", "launch"): [span(Span.BEGIN, 21, 25, step), span(Span.LAUNCH, 28, 31, step)],
            ("worker-0", "device"): [span(Span.PREFILL, 36, 45, step)],
            ("worker-0", "answers"): [span(Span.AWAIT, 31, 55, step), span(Span.AWAIT, 56, 57, step)],
        }

    requests = [request(1, 0, 0), request(2, 1, 1000), request(3, 2, 2000), request(4, 3, 2050)]
    lanes = [RecordedLane(*name, 1, sorted(record for one in requests for record in one[name])) for name in requests[0]]
    lanes.append(RecordedLane("client", "workloads", 2, [Record(1_000_000, 1_134_000, 0, 0, Span.REQUEST)]))
    hops = first_token_hops(lanes)
    assert tuple(hops) == HOPS
    assert hops["client to tokenizer"] == [1.0]
    assert hops["tokenizer to client"] == [15.0]
    assert [hops[hop][:2] for hop in HOPS[1:-1]] == [
        [float(us)] * 2 for us in (2, 3, 4, 5, 6, 7, 8, 9, 10, 23, 13, 14, 14)
    ]
    assert {len(hops[hop]) for hop in HOPS[1:-1]} == {2}  # the last of the two that overlap was alone from then on


def test_labels_name_the_clients_runs() -> None:
    lanes = [RecordedLane("client", "workloads", 7, [Record(1000, 3000, 0, 0, Span.REQUEST)])]
    (event,) = (event for event in chrome_trace(lanes, ["nano256 #0"])["traceEvents"] if event["ph"] == "X")
    assert (event["name"], event["ts"], event["dur"]) == ("nano256 #0", 0.0, 2.0)


def test_a_lane_outlives_its_process_and_keeps_the_newest(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from tercet.engine import trace; from tercet.engine.trace import Span, open_lanes\n"
        "trace._CAPACITY = 2**14\n"
        "(lane,) = open_lanes(sys.argv[1], 'worker-3', 'launch')\n"
        "for i in range(2**14 + 5): lane.add(Span.BEGIN, i, i + 1, i)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    (one,) = read_lanes(tmp_path)
    assert (one.process, one.lane) == ("worker-3", "launch")
    assert len(one.records) == 2**14
    assert one.records[0].number == 5
    assert one.records[-1] == Record(2**14 + 4, 2**14 + 5, 2**14 + 4, 0, Span.BEGIN)


_ON_A_SMALL_DISK = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
_MOUNTED = 'mount -t tmpfs -o size=$0 none "$1" && shift && exec "$@"'


@pytest.mark.skipif(
    not shutil.which("unshare")
    or subprocess.run([*_ON_A_SMALL_DISK, _MOUNTED, "64k", "/mnt", "true"], capture_output=True).returncode != 0,
    reason="needs namespaces of its own",
)
@pytest.mark.parametrize("size", [long("64k"), long("900k")])
async def test_a_full_disk_ends_the_record_and_nothing_else(size: str, ids_only_model: Path, tmp_path: Path) -> None:
    """From the first span on, and later; who is told of it is told once, also by the process that replaces another."""
    disk = tmp_path / "disk"
    disk.mkdir()
    address = f"ipc://{tmp_path}/front"
    flags = ["--load-format", "null", "--listen", address, "--trace-dir", f"{disk}/trace"]
    serve = [sys.executable, str(SCRIPTS / "serve.py"), str(ids_only_model), *flags]
    with subprocess.Popen(
        [*_ON_A_SMALL_DISK, _MOUNTED, size, str(disk), *serve],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ready ")
            async with Client(address) as client:
                params = SamplingParams(max_tokens=3000, ignore_eos=True)
                for _ in range(4):
                    assert len((await client.generate([1, 2, 3], params)).token_ids) == 3000
                (scheduler,) = children(process.pid, "scheduler")
                scheduler.kill()
                assert len((await client.generate([1, 2, 3], params)).token_ids) == 3000
            process.terminate()
            said = process.communicate(timeout=20)[1]
        finally:
            process.kill()
    assert process.returncode == 0
    warning = f"warning: --trace-dir {disk}/trace: No space left on device: "
    assert said.count(f"[worker 0] {warning}worker-0 no longer") == 1
    assert said.count(f"[scheduler] {warning}scheduler no longer") == 2
    assert said.count("starting it again") == 1


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StartupFailed, match=f"--trace-dir {file}: "):
        open_lanes(str(file), "scheduler", "loop")
    with pytest.raises(StartupFailed, match=f"--trace-dir {file}: "):
        tiny_engine("llama", trace_dir=str(file), load_format="null")
    with pytest.raises(ValueError, match="holds no recorded spans"):
        read_lanes(tmp_path)


def test_reading_while_it_is_written(tmp_path: Path) -> None:
    (lane,) = open_lanes(str(tmp_path), "scheduler", "loop")
    assert read_lane(tmp_path / f"scheduler.loop.{os.getpid()}.spans") == []
    lane.add(Span.TURN, 5, 9)
    lane.add(Span.PLAN, 5, 7, 2)
    lane.add(Span.PLAN, 6, 7, 3)
    spans = [(record.span, record.number) for record in read_lane(tmp_path / f"scheduler.loop.{os.getpid()}.spans")]
    assert spans == [(Span.TURN, 0), (Span.PLAN, 2), (Span.PLAN, 3)]


def test_nothing_loaded_is_walked_by_the_collector() -> None:
    """Once a child has begun, what it had loaded is no longer the garbage collector's business."""
    program = (
        "import gc, os, tempfile\n"
        "from tercet.engine.child import ChildSpec, Paths, SupervisorLink\n"
        "from tercet.engine.config import EngineConfig\n"
        "from tercet.ipc.addresses import make_addresses\n"
        "from tercet.ipc.process_messages import Begin, Limits\n"
        "import msgspec, numpy\n"
        "read, write = os.pipe()\n"
        "spec = ChildSpec('scheduler', 0, EngineConfig(model='m'), Paths('m'), make_addresses(1))\n"
        "os.write(write, msgspec.json.encode(Begin(Limits(1, 2, 3, 'none', 'none', 4))) + b'\\n')\n"
        "loaded = len(gc.get_objects())\n"
        "SupervisorLink(spec, os.fdopen(read, 'rb'), open(os.devnull, 'wb')).wait_begin()\n"
        "assert loaded > 10_000 and len(gc.get_objects()) < loaded / 10, (loaded, len(gc.get_objects()))\n"
        "os.rmdir(spec.addresses.directory); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)
