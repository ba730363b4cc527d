"""Sums over ranks, peer memory beside NCCL, by size: microseconds in a graph, on as many GPUs as there are ranks.

    python scripts/bench_all_reduce.py --ranks 2 --hidden-size 4096

Three things in two ways each: the sum alone; the sum with residual add and norm, in one kernel or behind NCCL; and the
exchange of 8 bytes a row by which ranks agree on a token. The last line says what `_BYTES` in model/peers.py is to be.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist

from tercet.model.parallel import Group
from tercet.triton_kernels.add_rms_norm import add_rms_norm
from tercet.triton_kernels.all_reduce import Inboxes, all_reduce, all_reduce_add_rms_norm, stack_rows

_NODES = 20
_ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
_COLUMNS = ("sum", "sum NCCL", "fused", "fused NCCL", "pairs", "pairs NCCL")


def microseconds(run: Callable[[], object]) -> float:
    """Of one call among many in a graph: the median over replays, of the slowest rank."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    for _ in range(_NODES):
        run()
    graph.capture_end()
    times = []
    for _ in range(9):
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()  # ranks meet here
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / _NODES)
    slowest = torch.tensor(sorted(times)[4], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def measure(group: Group, inboxes: Inboxes, rows: int, hidden: int) -> list[float]:
    """One line of the table."""
    update, residual = (torch.zeros(rows, hidden, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
    pairs = torch.zeros(rows, 2, dtype=torch.int32, device="cuda")
    gathered = pairs.new_empty(group.size * rows, 2)

    def apart() -> None:
        dist.all_reduce(update)
        add_rms_norm(update, residual, weight, 1e-6)

    return [
        microseconds(lambda: all_reduce(update, inboxes)),
        microseconds(lambda: dist.all_reduce(update)),
        microseconds(lambda: all_reduce_add_rms_norm(update, residual, weight, 1e-6, inboxes)),
        microseconds(apart),
        microseconds(lambda: stack_rows(pairs, inboxes)),
        microseconds(lambda: dist.all_gather_into_tensor(gathered, pairs)),
    ]


def run_rank(rank: int, size: int, rendezvous: str, hidden: int) -> None:
    """Measure; rank 0 prints lines of JSON."""
    device = torch.device("cuda", rank)
    group = Group.join(rank, size, device, rendezvous, timeout_s=60.0)
    group.connect(hidden, torch.bfloat16)
    torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    inboxes = group.inboxes_for(torch.zeros(1, hidden, dtype=torch.bfloat16, device=device))
    if inboxes is None:
        raise SystemExit("no peer memory here")
    for rows in _ROWS:
        if inboxes.hold(rows, hidden // 2):
            times = measure(group, inboxes, rows, hidden)
            if rank == 0:
                print(json.dumps([rows, rows * hidden * 2, times]), flush=True)
    group.close()


def run_ranks(size: int, hidden: int) -> list[tuple[int, int, list[float]]]:
    """Start the ranks and print the table as it comes."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--ranks", str(size), "--hidden-size", str(hidden)]
        command += ["--rendezvous", f"{folder}/rendezvous"]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=None if rank else subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        try:
            print(f"{'rows':>5} {'bytes':>9} " + " ".join(f"{name:>11}" for name in _COLUMNS), flush=True)
            assert ranks[0].stdout is not None
            for line in ranks[0].stdout:
                rows, num_bytes, times = json.loads(line)
                lines.append((rows, num_bytes, times))
                print(f"{rows:5} {num_bytes:9} " + " ".join(f"{time:11.2f}" for time in times), flush=True)
            if any(rank.wait(60) for rank in ranks):
                raise SystemExit("a rank failed")
        finally:
            for process in ranks:
                process.kill()
    return lines


def fused_wins_up_to(lines: list[tuple[int, int, list[float]]]) -> int:
    """The largest message below which the fused kernel always wins."""
    largest = 0
    for _, num_bytes, times in lines:
        if times[2] >= times[3]:
            break
        largest = num_bytes
    return largest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments.rank, arguments.ranks, arguments.rendezvous, arguments.hidden_size)
        return 0
    if torch.cuda.device_count() < arguments.ranks:
        parser.error(f"--ranks {arguments.ranks}, but there are {torch.cuda.device_count()} GPUs")
    print(f"fused wins up to {fused_wins_up_to(run_ranks(arguments.ranks, arguments.hidden_size))} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
