"""Sums of whole messages that other ranks' copies brought, against float64 and against the kernels they replace."""

import threading
import time

import pytest
import torch
from torch import Tensor

from interpreted import rerun_interpreted
from tercet.triton_kernels.add_arrived import Arrivals, add_arrived, add_arrived_rms_norm, begin_step
from tercet.triton_kernels.add_rms_norm import add_rms_norm
from tercet.triton_kernels.all_reduce import sum_in_order
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED

EPS = 1e-5
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="the kernel runs in Triton's interpreter")


def arrivals_of(rank: int, ranks: int, room: int, hidden: int, dtype: torch.dtype, device: str = "cpu") -> Arrivals:
    """Nothing has come: parts are NaN, and step 7 is the last that was counted."""
    return Arrivals(
        rank,
        torch.full((4, ranks - 1, room, hidden), float("nan"), dtype=dtype, device=device),
        torch.full((12, ranks - 1), 7, dtype=torch.int32, device=device),
        torch.full((1,), 7, dtype=torch.int32, device=device),
    )


def arrive(arrivals: Arrivals, number: int, parts_PTD: Tensor) -> None:
    """What the other ranks' copies would do in step 8."""
    others = [part for rank, part in enumerate(parts_PTD) if rank != arrivals.rank]
    arrivals.parts_QPMD[number % 4, :, : parts_PTD.shape[1]] = torch.stack(others)
    arrivals.flags_NP[number] = 8


@needs_interpreter
@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (1, 2), (0, 3), (1, 3), (2, 4)])
@pytest.mark.parametrize(("dtype", "hidden"), [(torch.float32, 37), (torch.float16, 96)])
def test_adds_in_rank_order(rank: int, ranks: int, dtype: torch.dtype, hidden: int) -> None:
    arrivals = arrivals_of(rank, ranks, 9, hidden, dtype)
    rest = begin_step(arrivals, torch.tensor([11], dtype=torch.int32), 4)
    assert (rest.item(), arrivals.step_1.item()) == (7, 8)
    for number, rows in ((0, 9), (3, 1), (5, 4), (11, 6)):
        parts = torch.randn(ranks, rows, hidden).mul_(3).to(dtype)
        residual, weight = torch.randn(rows, hidden).to(dtype), torch.randn(hidden).to(dtype)
        if rows % 2:  # of some families they keep 32 bits
            weight = weight.float()
        arrive(arrivals, number, parts)
        normed, plain, other = residual.clone(), residual.clone(), residual.clone()
        got = add_arrived_rms_norm(parts[rank].clone(), arrivals, number, normed, weight, EPS)
        add_arrived(parts[rank].clone(), arrivals, number, plain, overlap=False)
        wanted = add_rms_norm(sum_in_order(parts), other, weight, EPS, deterministic=True)
        assert torch.equal(normed, other)
        assert torch.equal(plain, other)
        assert torch.equal(got, wanted)
        exact = residual.double() + parts.double().sum(0)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(normed.double(), exact, rtol=tolerance, atol=tolerance)
        exact = exact * torch.rsqrt(exact.square().mean(1, keepdim=True) + EPS) * weight.double()
        torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)


@needs_interpreter
@pytest.mark.parametrize("count", [0, 2, 5, 40])
def test_leaves_out_rows_behind_the_count(count: int) -> None:
    arrivals = arrivals_of(0, 2, 5, 16, torch.float32)
    begin_step(arrivals, torch.tensor([5], dtype=torch.int32), 5)
    parts, residual, weight = torch.randn(2, 5, 16), torch.randn(5, 16), torch.randn(16)
    arrive(arrivals, 0, parts)
    before = residual.clone()
    rows = torch.tensor([count], dtype=torch.int32)
    add_arrived_rms_norm(parts[0].clone(), arrivals, 0, residual, weight, EPS, rows)
    torch.testing.assert_close(residual[:count], (before + parts.sum(0))[:count])
    assert torch.equal(residual[count:], before[count:])


@needs_interpreter
def test_waits_for_every_rank() -> None:
    arrivals = arrivals_of(1, 3, 2, 16, torch.float32)
    begin_step(arrivals, torch.tensor([2], dtype=torch.int32), 2)
    parts, residual = torch.randn(3, 2, 16), torch.zeros(2, 16)

    def come_late() -> None:
        for place, rank in ((1, 2), (0, 0)):
            time.sleep(0.2)
            arrivals.parts_QPMD[2, place, :2] = parts[rank]
            arrivals.flags_NP[2, place] = 8

    late = threading.Thread(target=come_late)
    late.start()
    add_arrived(parts[1].clone(), arrivals, 2, residual)
    assert not late.is_alive() or int(arrivals.flags_NP[2].min()) == 8
    torch.testing.assert_close(residual, parts[0] + parts[1] + parts[2])
    late.join()


@pytest.mark.skipif(INTERPRETED, reason="Triton compiles or interprets")
@pytest.mark.parametrize(("capability", "rank", "ranks"), [(80, 1, 2), (90, 1, 2), (90, 1, 4)])
def test_compiles_and_asks_for_what_is_new(capability: int, rank: int, ranks: int) -> None:
    arrivals = arrivals_of(rank, ranks, 4096, 4096, torch.bfloat16, "meta")
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    count = torch.empty(1, dtype=torch.int32, device="meta")
    with compiling_for(capability) as kernels:
        begin_step(arrivals, count, 4096)
        for number in (0, 1, 6):
            add_arrived_rms_norm(x, arrivals, number, x, x[0], EPS, count)
        add_arrived(x, arrivals, 11, x, overlap=False)
    assert len({id(kernel) for kernel in kernels}) == 3, "numbers of messages do not specialise"
    ptx = kernels[1].asm["ptx"]
    flag, part = ptx.index(".global.sys.acquire."), ptx.index("ld.global.cg")
    assert flag < ptx.index("bar.sync", flag) < part, "all warps wait for the flag before they load"
    assert kernels[1].metadata.num_warps == 8


def test_refuses_what_does_not_fit() -> None:
    arrivals = arrivals_of(0, 2, 4, 16, torch.float32)
    with pytest.raises(ValueError, match=r"update: got message 0 of 5 rows, wanted one below 12 of 1 to 4 rows"):
        add_arrived(torch.zeros(5, 16), arrivals, 0, torch.zeros(5, 16))
    with pytest.raises(ValueError, match="update: got message 12 of 4 rows"):
        add_arrived(torch.zeros(4, 16), arrivals, 12, torch.zeros(4, 16))
    with pytest.raises(ValueError, match=r"update: got shape \[4, 8\], wanted \[\*, 16\]"):
        add_arrived(torch.zeros(4, 8), arrivals, 0, torch.zeros(4, 8))
    with pytest.raises(ValueError, match="residual: got"):
        add_arrived(torch.zeros(4, 16), arrivals, 0, torch.zeros(3, 16))
    with pytest.raises(ValueError, match="parts: got"):
        add_arrived(torch.zeros(4, 16, dtype=torch.float16), arrivals, 0, torch.zeros(4, 16, dtype=torch.float16))
    with pytest.raises(ValueError, match="weight: got"):
        add_arrived_rms_norm(torch.zeros(4, 16), arrivals, 0, torch.zeros(4, 16), torch.zeros(8), EPS)


def test_interpreted() -> None:
    rerun_interpreted(__file__)
