"""The ranks' collective operations over gloo, in real processes: right sums, nothing listening outward, no waiting."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tercet.model.parallel import Group, set_cpu_threads

CPU = torch.device("cpu")
_RANK = """
import json, os, sys
import psutil, torch
from tercet.model.parallel import Group
rank, size, rendezvous, leaves = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "leaves"
group = Group.join(rank, size, torch.device("cpu"), rendezvous, timeout_s=30.0)
x = torch.arange(6.0).view(2, 3) + 10 * rank
summed = group.all_reduce(x.clone())
gathered = group.all_gather(x, 3 * size - 1)
rows = torch.randn(50, 301, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (3 * rank)
whole = group.all_reduce(rows.clone(), deterministic=True)
parts = [group.all_reduce(rows[i : i + n].clone(), deterministic=True) for i, n in ((0, 1), (1, 30), (31, 19))]
assert torch.equal(torch.cat(parts), whole), "a row's bits do not depend on the rows beside it"
wanted = sum(torch.randn(50, 301, generator=torch.Generator().manual_seed(r)) * 10.0 ** (3 * r) for r in range(size))
torch.testing.assert_close(whole, wanted)
stacked = torch.arange(0, 6, 3.0).view(1, 2, 1) + 10 * torch.arange(size).view(-1, 1, 1)
assert torch.equal(group.stack(x[:, :1]), stacked)
listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
print(json.dumps([summed.tolist(), gathered.tolist(), group.min(7 - rank), listening]), flush=True)
if leaves and rank == 1:
    os._exit(3)
if leaves:
    try:
        group.all_reduce(torch.ones(3))
    except RuntimeError:
        os._exit(4)
group.close()
"""


def ranks(size: int, folder: Path, leaves: str = "stays") -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _RANK]
    return [
        subprocess.Popen(
            [*command, str(rank), str(size), str(folder / "rendezvous"), leaves], stdout=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]


@pytest.mark.long
def test_three_ranks(tmp_path: Path) -> None:
    processes = ranks(3, tmp_path)
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    base = torch.arange(6.0).view(2, 3)
    for summed, gathered, smallest, listening in answers:
        assert torch.equal(torch.tensor(summed), 3 * base + 30)
        assert torch.equal(torch.tensor(gathered), torch.cat((base, base + 10, base + 20), 1)[:, :8])
        assert smallest == 5
        assert set(listening) == {"127.0.0.1"}


def test_a_rank_that_dies_is_noticed_at_once(tmp_path: Path) -> None:
    start = time.monotonic()
    processes = ranks(2, tmp_path, "leaves")
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [4, 3]
    assert time.monotonic() - start < 25  # well before the timeout of 30 s


def test_one_rank_needs_nobody() -> None:
    group = Group.join(0, 1, CPU, "/nowhere/at/all")
    x = torch.randn(3, 4)
    assert group.all_reduce(x) is x
    assert torch.equal(group.all_gather(x, 3), x[:, :3])
    assert group.min(5) == 5
    assert not torch.distributed.is_initialized()
    group.close()


def test_rank_out_of_range() -> None:
    with pytest.raises(ValueError, match="rank is 2; want 0 to 1"):
        Group(2, 2, CPU)


def test_threads_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        assert set_cpu_threads(1000) == torch.get_num_threads() == 1
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
        for limit, threads in (("3", 3), ("9", 8), ("0", 8), ("many", 8)):
            monkeypatch.setenv("OMP_THREAD_LIMIT", limit)
            assert set_cpu_threads(1) == torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
