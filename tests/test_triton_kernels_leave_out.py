"""Rows that are left out have no position; the others keep theirs."""

import pytest
import torch

from interpreted import rerun_interpreted
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.leave_out import leave_out

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_rows", [1, 7, 64, 512])
def test_rows(num_rows: int, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    before = torch.randint(0, 2**31 - 1, (num_rows,), dtype=torch.int32)
    late = torch.randperm(num_rows)[: (num_rows + 1) // 2].to(torch.int32)
    outside = torch.tensor([-1, num_rows, 2**31 - 1, -(2**31)], dtype=torch.int32)
    positions = before.to(device)
    leave_out(torch.cat([late, outside]).to(device), positions)
    assert positions.tolist() == [-1 if row in late else position for row, position in enumerate(before.tolist())]
    kept = positions.clone()
    leave_out(late[:0].to(device), positions)
    assert torch.equal(positions, kept)


def test_refusals() -> None:
    rows, positions = torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="rows: got"):
        leave_out(rows.long(), positions)
    with pytest.raises(ValueError, match="positions: got"):
        leave_out(rows, positions[:, None])
    with pytest.raises(ValueError, match="positions: "):
        leave_out(rows, torch.zeros(6, dtype=torch.int32)[::2])


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_compile(capability: int) -> None:
    with compiling_for(capability) as kernels:
        for count, num_rows in ((1, 1), (16, 512)):
            rows, positions = (torch.empty(n, dtype=torch.int32, device="meta") for n in (count, num_rows))
            leave_out(rows, positions)
    assert len({kernel.hash for kernel in kernels}) == 1
    assert kernels[0].asm["cubin"]


def test_interpreted() -> None:
    rerun_interpreted(__file__)
