"""Where the time of a first token goes, hop by hop, out of an engine's record. Pure.

Only requests that have the engine to themselves are looked at: with others about, waiting is somebody else's step. What
comes before a client's first run warms the engine up, and does not count.
"""

import statistics
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

from tercet.engine.trace import Record, Span
from trace_file import RecordedLane

HOPS = (
    "client to tokenizer",
    "tokenizer hears",
    "tokenizer to scheduler",
    "scheduler queues",
    "scheduler plans",
    "scheduler to worker",
    "worker begins",
    "launch to device",
    "device computes",
    "device to answers",
    "worker to scheduler",
    "scheduler accounts",
    "scheduler to tokenizer",
    "tokenizer speaks",
    "tokenizer to client",
)
"""Each from the end of the one before. The first and the last need a client that records, as bench.py's does."""


def first_token_hops(lanes: Sequence[RecordedLane]) -> dict[str, list[float]]:
    """Microseconds of each hop for each request that was alone. A hop may be negative: a sender's call may return
    after the receiver has begun."""
    times: dict[str, list[float]] = {hop: [] for hop in HOPS}
    for moments in _requests(lanes):
        for hop, (begin_ns, end_ns) in zip(HOPS, pairwise(moments), strict=True):
            if begin_ns is not None and end_ns is not None:
                times[hop].append((end_ns - begin_ns) / 1e3)
    return {hop: values for hop, values in times.items() if values}


def hop_lines(lanes: Sequence[RecordedLane]) -> list[str]:
    """What to print."""
    hops = first_token_hops(lanes)
    if not hops:
        return []
    count = max(map(len, hops.values()))
    lines = [f"first token of {count} requests that were alone: least and median of each hop, us"]
    lines += [f"  {hop:24}{min(values):10.0f}{statistics.median(values):10.0f}" for hop, values in hops.items()]
    return lines


def _requests(lanes: Sequence[RecordedLane]) -> Iterator[list[int | None]]:
    """The moments between the hops of each request that was alone."""

    def records(process: str, lane: str, *spans: Span) -> list[Record]:
        found = [one.records for one in lanes if (one.process, one.lane) == (process, lane)]
        return [record for part in found for record in part if record.span in spans]

    runs = records("client", "workloads", Span.REQUEST)
    hears = [record for record in records("tokenizer", "loop", Span.HEAR) if record.number]
    if runs:
        hears = [one for one in hears if one.begin_ns >= runs[0].begin_ns]
    submits = {record.number: record for record in records("scheduler", "loop", Span.TAKE_SUBMIT)}
    plans = records("scheduler", "loop", Span.PLAN)
    speaks = records("tokenizer", "loop", Span.SPEAK)
    takes = records("scheduler", "loop", Span.TAKE_SAMPLED)
    by_step = [
        {record.number: record for record in reversed(part)}
        for part in (
            records("worker-0", "launch", Span.BEGIN),
            records("worker-0", "launch", Span.LAUNCH),
            records("worker-0", "device", Span.DECODE, Span.PREFILL),
            records("worker-0", "answers", Span.AWAIT),
            takes,
        )
    ]
    for index, hear in enumerate(hears):
        submit = submits.get(hear.number)
        plan = submit and _first(plans, submit.begin_ns)
        if submit is None or plan is None or not all(plan.number in part for part in by_step):
            continue
        begin, launch, device, answer, taken = (part[plan.number] for part in by_step)
        speak = _first(speaks, taken.begin_ns)
        if speak is None or (index + 1 < len(hears) and hears[index + 1].begin_ns < speak.end_ns):
            continue
        run = _lone_run(runs, hears, hear, takes)
        yield [
            run and run.begin_ns,
            hear.begin_ns, hear.end_ns, submit.begin_ns, submit.end_ns, plan.end_ns, begin.begin_ns,
            launch.begin_ns, device.begin_ns, device.end_ns, answer.end_ns, taken.begin_ns, taken.end_ns,
            speak.begin_ns, speak.end_ns,
            run and run.end_ns,
        ]  # fmt: skip


def _lone_run(runs: Sequence[Record], hears: Sequence[Record], hear: Record, takes: Sequence[Record]) -> Record | None:
    """The client's run that this request was all of, if it was, and one token was all it got."""
    for run in runs:
        if run.begin_ns <= hear.begin_ns <= run.end_ns:
            inside = [one for one in (*hears, *takes) if run.begin_ns <= one.begin_ns <= run.end_ns]
            return run if len(inside) == 2 else None
    return None


def _first(records: Sequence[Record], begin_ns: int) -> Record | None:
    index = bisect_left(records, begin_ns, key=lambda record: record.begin_ns)
    return records[index] if index < len(records) else None
