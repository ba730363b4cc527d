"""Ranks started by scripts/rank_processes.py: all run to the end, and all end when one fails."""

import sys
from pathlib import Path

import psutil
import pytest
import torch

import bench_all_reduce
import tune_step
from rank_processes import run_ranks

PROGRAM = """
import argparse, pathlib, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("how")
parser.add_argument("--rendezvous", type=pathlib.Path)
parser.add_argument("--rank", type=int)
arguments = parser.parse_args()
meeting = arguments.rendezvous.parent
(meeting / str(arguments.rank)).touch()
while len(list(meeting.iterdir())) < 3:
    time.sleep(0.01)
print(arguments.rank, "says", *range(3), sep="\\n", flush=True)
if arguments.how == str(arguments.rank):
    sys.exit(3)
while arguments.how != "well":  # as a rank that waits for one that is gone
    time.sleep(0.1)
"""


def command(folder: Path, how: str) -> list[str]:
    (folder / "program.py").write_text(PROGRAM)
    return [sys.executable, str(folder / "program.py"), how]


def test_all_to_the_end(tmp_path: Path) -> None:
    heard: list[str] = []
    run_ranks(command(tmp_path, "well"), 3, heard.append)
    assert [line.strip() for line in heard] == ["0", "says", "0", "1", "2"]


@pytest.mark.parametrize("failing", ["0", "2"])
def test_one_that_fails_ends_all(tmp_path: Path, failing: str) -> None:
    with pytest.raises(SystemExit, match=r"a rank failed: .*\b3\b"):
        run_ranks(command(tmp_path, failing), 3, lambda line: None)
    assert not [one for one in psutil.Process().children() if str(tmp_path) in " ".join(one.cmdline())]


def test_what_ranks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program is started again with its own arguments, and hears what rank 0 says."""
    started: list[tuple[list[str], int]] = []

    def run(command: list[str], size: int, hear: object) -> None:
        started.append((command[1:], size))
        if Path(command[1]).name == "bench_all_reduce.py":
            hear("[1, 8192, [3.0, null]]\n")  # type: ignore[operator]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(bench_all_reduce, "run_ranks", run)
    monkeypatch.setattr(tune_step, "run_ranks", run)
    assert bench_all_reduce.table(2, 4096) == [(1, 8192, [3.0, None])]
    options = ["--shape", "qwen3-8b", "--tensor-parallel-size", "2", "--rows", "8"]
    monkeypatch.setattr(sys, "argv", ["tune_step.py", "time", *options])
    tune_step.main()
    assert started == [
        ([bench_all_reduce.__file__, "--ranks", "2", "--hidden-size", "4096"], 2),
        ([tune_step.__file__, "time", *options], 2),
    ]
