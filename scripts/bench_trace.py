"""What bench.py does with an engine's record: a Chrome trace, and a few lines that sum it up."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tercet.engine.trace import Span, open_lanes
from trace_file import RecordedLane, busy_lines, read_lanes, write_trace
from trace_hops import hop_lines


class RunRecord:
    """The runs of a benchmark as a lane of their own in the engine's record, and the trace of it all."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        (self._lane,) = open_lanes(folder, "client", "workloads")
        self._labels: list[str] = []

    def add(self, label: str, begin_ns: int) -> None:
        """A run that ends now."""
        self._lane.end(Span.REQUEST, begin_ns, len(self._labels))
        self._labels.append(label)

    def write(self, file: Path) -> None:
        """The Chrome trace, and what can be said of it."""
        _write(read_lanes(Path(self._folder)), file, self._labels)


def run_trace(folder: Path, file: Path) -> list[dict[str, Any]]:
    """What an engine left in its folder, made into a trace."""
    lanes = read_lanes(folder)
    _write(lanes, file, ())
    return [{"process": lane.process, "lane": lane.lane, "spans": len(lane.records)} for lane in lanes]


def _write(lanes: Sequence[RecordedLane], file: Path, labels: Sequence[str]) -> None:
    write_trace(lanes, file, labels)
    print("\n".join([*busy_lines(lanes, labels), *hop_lines(lanes)]), flush=True)
