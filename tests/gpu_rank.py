"""One rank of a group of GPUs, checking sums and steps against what every rank can compute by itself.

`python gpu_rank.py RANK SIZE RENDEZVOUS`; ends with 0 when all is as it should be.
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tercet.model.exchange import Exchange, half_of
from tercet.model.parallel import Group
from tercet.model.peers import Limits, connect_peers
from tercet.triton_kernels.add_rms_norm import add_rms_norm, rms_norm
from tercet.triton_kernels.all_reduce import all_reduce, all_reduce_add_rms_norm, sum_in_order
from tercet.triton_kernels.all_reduce_words import stack_rows
from tercet.triton_kernels.inbox import Inboxes, RowInboxes, WordInboxes

HIDDEN, EPS = 4096, 1e-6
CROWDS = Limits(words=256 * 2**10, rows=16 * 2**20)


def drawn(name: str, rank: int, rows: int) -> Tensor:
    """The same numbers on every rank that asks for them."""
    generator = torch.Generator("cuda").manual_seed(sum(map(ord, name)) * 997 + rank * 31 + rows)
    return torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device="cuda").normal_(0, 3, generator=generator)


def parts(name: str, size: int, rows: int) -> Tensor:
    return torch.stack([drawn(name, rank, rows) for rank in range(size)])


def check_sums(group: Group, kinds: list[Inboxes]) -> None:
    """Through peers or NCCL, alone or fused: near float64; where batches must not matter, all ways to the same bits."""
    for rows in (1, 3, 16, 31, 64, 65, 127, 256, 257, 1000, 2048, 2049):
        wanted = parts("x", group.size, rows)
        got = group.all_reduce(drawn("x", group.rank, rows), deterministic=True)
        assert torch.equal(got, sum_in_order(wanted)), rows
        torch.testing.assert_close(got.double(), wanted.double().sum(0), rtol=1e-2, atol=3e-2)
        for inboxes in kinds:
            if inboxes.hold(rows, HIDDEN * 2):
                check_peers(inboxes, rows, wanted)


def check_peers(inboxes: Inboxes, rows: int, wanted: Tensor) -> None:
    """Sums and ids through these inboxes, whether the group would send so many rows through them or not."""
    rank, size = inboxes.rank, len(inboxes.addresses)
    assert torch.equal(all_reduce(drawn("x", rank, rows), inboxes), sum_in_order(wanted)), rows
    weight, residual = drawn("weight", 0, 1)[0], drawn("residual", 0, rows)
    other = residual.clone()
    normed = all_reduce_add_rms_norm(drawn("x", rank, rows), residual, weight, EPS, inboxes)
    apart = add_rms_norm(sum_in_order(wanted), other, weight, EPS)
    assert torch.equal(residual, other), rows
    torch.testing.assert_close(normed, apart, rtol=1e-2, atol=1e-2)
    if isinstance(inboxes, WordInboxes):
        base = torch.arange(2 * rows, device="cuda", dtype=torch.int32).view(rows, 2)
        assert torch.equal(stack_rows(base * (rank + 1), inboxes), torch.stack([base * (r + 1) for r in range(size)]))


def check_crowds(group: Group, inboxes: Inboxes) -> None:
    """All the rows there is room for, call upon call: a multiprocessor has many programs, whose warps drift apart."""
    rows = inboxes.calls_M.shape[0]
    words = torch.zeros(rows, 2, dtype=torch.int32, device="cuda")
    values = parts("crowd", group.size, rows)
    total = sum_in_order(values)
    x, residual = torch.empty_like(total), torch.zeros_like(total)
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    before = int(inboxes.calls_M.min())
    for turn in range(300):
        # Of other numbers than the calls before it: who reads too early sees what is not this turn's.
        sign = 1 - turn % 4 // 2 * 2
        torch.mul(values[group.rank], sign, out=x)
        all_reduce(x, inboxes)
        wrong += (x != total * sign).sum()
        torch.mul(values[group.rank], -sign, out=x)
        residual.zero_()
        all_reduce_add_rms_norm(x, residual, weight, EPS, inboxes)
        wrong += (residual != total * -sign).sum()
        if isinstance(inboxes, WordInboxes):
            stack_rows(words, inboxes)
        else:
            all_reduce(x, inboxes)
    assert int(wrong) == 0, f"{int(wrong)} numbers are not those of their call"
    assert int(inboxes.calls_M.min()) == before + 900
    x.zero_()
    for _ in range(300):  # and with nothing between them
        all_reduce(x, inboxes)
        all_reduce_add_rms_norm(x, residual, weight, EPS, inboxes)
        all_reduce(x, inboxes)
    assert torch.equal(all_reduce(values[group.rank].clone(), inboxes), total)
    assert int(inboxes.calls_M.min()) == before + 1801


def captured(run: Callable[[], None], error_mode: str) -> torch.cuda.CUDAGraph:
    """Run once, then capture."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode=error_mode)
    run()
    graph.capture_end()
    return graph


def check_graphs(group: Group) -> None:
    """Peers and NCCL in one captured graph, replayed many times with inputs that change, beside calls without one."""
    # Words, words, flags, flags or (by the limits of some numbers of ranks) NCCL, NCCL, and back.
    sizes = (1, 16, 100, 300, 2100, 2, 300, 100, 16, 1)
    # NCCL rounds each sum on the way to the last, and these are as large as 32: each is off by 1/16 at most.
    atol = 6e-2 * (group.size - 1)
    inputs = [torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device="cuda") for rows in sizes]
    outputs = [x.clone() for x in inputs]

    def run() -> None:
        for x, out in zip(inputs, outputs, strict=True):
            out.copy_(x)
            group.all_reduce(out)

    graph = captured(run, "thread_local")
    for turn in range(60):
        wanted = []
        for index, x in enumerate(inputs):
            values = [drawn(f"turn {turn} {index}", rank, x.shape[0]) for rank in range(group.size)]
            x.copy_(values[group.rank])
            wanted.append(torch.stack(values).double().sum(0))
        if turn % 7 == 3:
            group.all_reduce(drawn("between", group.rank, 5))
        if turn % (group.size + 1) == group.rank:
            torch.cuda._sleep(3_000_000)  # this rank comes late
        for _ in range(3):
            graph.replay()
        for out, total in zip(outputs, wanted, strict=True):
            torch.testing.assert_close(out.double(), total, rtol=2e-2, atol=atol)


def check_exchange(group: Group, exchange: Exchange) -> None:
    """Two steps of two sums each in one graph, in halves, replayed with inputs that change and ranks that come late."""
    counts = {3000: 3000, 2048: 900}  # of the second, one half is padding
    residuals = {rows: torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device="cuda") for rows in counts}
    updates = {(rows, turn): torch.zeros_like(residuals[rows]) for rows in counts for turn in range(2)}
    normed = {rows: torch.zeros_like(residuals[rows]) for rows in counts}
    weight = drawn("weight", 0, 1)[0]
    counts_1 = {rows: torch.tensor([count], dtype=torch.int32, device="cuda") for rows, count in counts.items()}

    def run() -> None:
        for rows, residual in residuals.items():
            first = half_of(rows)
            halves = ((slice(0, first), counts_1[rows]), (slice(first, rows), exchange.begin(counts_1[rows], first)))
            messages = [exchange.send(updates[rows, 0][half] * 1) for half, _ in halves]
            for message, (half, count_1) in zip(messages, halves, strict=True):
                normed[rows][half] = exchange.add(message, residual[half], weight, EPS, count_1)
            messages = [exchange.send(updates[rows, 1][half] * 1) for half, _ in halves]
            exchange.end([(message, residual[half]) for message, (half, _) in zip(messages, halves, strict=True)])

    graph = captured(run, "relaxed")
    for turn in range(12):
        wanted = {}
        for rows, residual in residuals.items():
            residual.copy_(drawn(f"residual {turn}", 0, rows))
            parts_of = [parts(f"turn {turn} {i}", group.size, rows) for i in range(2)]
            for i in range(2):
                updates[rows, i].copy_(parts_of[i][group.rank])
            after = residual.clone()
            add_rms_norm(sum_in_order(parts_of[0]), after, weight, EPS)
            wanted[rows] = rms_norm(after, weight, EPS, deterministic=True), after.add(sum_in_order(parts_of[1]))
        if turn % (group.size + 1) == group.rank:
            torch.cuda._sleep(3_000_000)  # this rank comes late
        graph.replay()
        for rows, (after_norm, after) in wanted.items():
            count = counts[rows]
            assert torch.equal(normed[rows][:count], after_norm[:count]), (turn, rows)
            assert torch.equal(residuals[rows][:count], after[:count]), (turn, rows)


def main() -> None:
    rank, size, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    device = torch.device("cuda", rank)
    group = Group.join(rank, size, device, rendezvous, timeout_s=60.0)
    group.connect(HIDDEN, torch.bfloat16, max_tokens=3000, num_sums=2)
    torch.cuda.set_stream(torch.cuda.Stream(device))
    few, many = (group.inboxes_for(drawn("x", rank, rows)) for rows in (1, 100))
    kinds = [inboxes for inboxes in (few, many) if inboxes is not None]
    print(f"rank {rank}: peers {isinstance(few, WordInboxes) and isinstance(many, RowInboxes)}", flush=True)
    # How many rows go through peers depends on what pays among so many ranks; that crowds of them do is owed to all.
    if size > 2 and (peers := connect_peers(rank, size, device, HIDDEN, torch.bfloat16, group.min, CROWDS)):
        kinds.append(peers.rows)
    check_sums(group, kinds)
    print(f"rank {rank}: sums", flush=True)
    for inboxes in kinds:
        check_crowds(group, inboxes)
        print(f"rank {rank}: crowds of {inboxes.calls_M.shape[0]} in {type(inboxes).__name__}", flush=True)
    check_graphs(group)
    print(f"rank {rank}: graphs", flush=True)
    if exchange := group.exchange_for(3000):
        check_exchange(group, exchange)
        print(f"rank {rank}: exchange", flush=True)
    dist.barrier()
    group.close()


if __name__ == "__main__":
    main()
