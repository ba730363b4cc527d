"""One rank of a group of GPUs, checking sums and steps against what every rank can compute by itself.

`python gpu_rank.py RANK SIZE RENDEZVOUS`; ends with 0 when all is as it should be.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor

from tercet.model.parallel import Group
from tercet.triton_kernels.add_rms_norm import add_rms_norm
from tercet.triton_kernels.all_reduce import Inboxes, all_reduce, all_reduce_add_rms_norm, stack_rows, sum_in_order

HIDDEN, EPS = 4096, 1e-6


def drawn(name: str, rank: int, rows: int) -> Tensor:
    """The same numbers on every rank that asks for them."""
    generator = torch.Generator("cuda").manual_seed(sum(map(ord, name)) * 997 + rank * 31 + rows)
    return torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device="cuda").normal_(0, 3, generator=generator)


def parts(name: str, size: int, rows: int) -> Tensor:
    return torch.stack([drawn(name, rank, rows) for rank in range(size)])


def check_sums(group: Group) -> None:
    """Through peers or NCCL, alone or fused: near float64; for two ranks all ways to the same bits."""
    for rows in (1, 3, 16, 31, 64, 256, 257, 1000):
        wanted = parts("x", group.size, rows)
        got = group.all_reduce(drawn("x", group.rank, rows), deterministic=True)
        assert torch.equal(got, sum_in_order(wanted)), rows
        torch.testing.assert_close(got.double(), wanted.double().sum(0), rtol=1e-2, atol=3e-2)
        inboxes = group.inboxes_for(got)
        if inboxes is None:
            continue
        assert torch.equal(all_reduce(drawn("x", group.rank, rows), inboxes), sum_in_order(wanted)), rows
        weight, residual = drawn("weight", 0, 1)[0], drawn("residual", 0, rows)
        other = residual.clone()
        normed = all_reduce_add_rms_norm(drawn("x", group.rank, rows), residual, weight, EPS, inboxes)
        apart = add_rms_norm(sum_in_order(wanted), other, weight, EPS)
        assert torch.equal(residual, other), rows
        torch.testing.assert_close(normed, apart, rtol=1e-2, atol=1e-2)
        pairs = torch.arange(2 * rows, device="cuda", dtype=torch.int32).view(rows, 2) * (group.rank + 1)
        base = pairs // (group.rank + 1)
        assert torch.equal(stack_rows(pairs, inboxes), torch.stack([base * (r + 1) for r in range(group.size)]))


def check_crowds(group: Group, inboxes: Inboxes) -> None:
    """All the rows there is room for, call upon call: a multiprocessor has many programs, whose warps drift apart."""
    rows = inboxes.calls_M.shape[0]
    words = torch.zeros(rows, 2, dtype=torch.int32, device="cuda")
    x = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
    residual, weight = torch.zeros_like(x), torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
    for _ in range(300):
        all_reduce(x, inboxes)
        all_reduce_add_rms_norm(x, residual, weight, EPS, inboxes)
        stack_rows(words, inboxes)
    values = parts("crowd", group.size, rows)
    assert torch.equal(all_reduce(values[group.rank].clone(), inboxes), sum_in_order(values))
    assert int(inboxes.calls_M.min()) >= 901


def check_graphs(group: Group, inboxes: Inboxes | None) -> None:
    """Peers and NCCL in one captured graph, replayed many times with inputs that change, beside calls without one."""
    few = inboxes.calls_M.shape[0] // 8 if inboxes else 4
    sizes = (1, few, 2000, 2, few, 1)
    inputs = [torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device="cuda") for rows in sizes]
    outputs = [x.clone() for x in inputs]

    def run() -> None:
        for x, out in zip(inputs, outputs, strict=True):
            out.copy_(x)
            group.all_reduce(out)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    run()
    graph.capture_end()
    for turn in range(60):
        wanted = []
        for index, x in enumerate(inputs):
            values = [drawn(f"turn {turn} {index}", rank, x.shape[0]) for rank in range(group.size)]
            x.copy_(values[group.rank])
            wanted.append(torch.stack(values).double().sum(0))
        if turn % 7 == 3:
            group.all_reduce(drawn("between", group.rank, 5))
        if turn % 5 == group.rank:
            torch.cuda._sleep(3_000_000)  # this rank comes late
        for _ in range(3):
            graph.replay()
        for out, total in zip(outputs, wanted, strict=True):
            torch.testing.assert_close(out.double(), total, rtol=2e-2, atol=6e-2)


def main() -> None:
    rank, size, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    device = torch.device("cuda", rank)
    group = Group.join(rank, size, device, rendezvous, timeout_s=60.0)
    group.connect(HIDDEN, torch.bfloat16)
    torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    inboxes = group.inboxes_for(torch.zeros(1, HIDDEN, dtype=torch.bfloat16, device=device))
    print(f"rank {rank}: peers {inboxes is not None}", flush=True)
    check_sums(group)
    print(f"rank {rank}: sums", flush=True)
    if inboxes is not None:
        check_crowds(group, inboxes)
    check_graphs(group, inboxes)
    print(f"rank {rank}: graphs", flush=True)
    dist.barrier()
    group.close()


if __name__ == "__main__":
    main()
