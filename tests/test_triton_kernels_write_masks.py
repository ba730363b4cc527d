"""Masks get into their slots' rows to the bit, and no other row changes."""

import re

import pytest
import torch
from torch import Tensor

from interpreted import rerun_interpreted
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.write_masks import write_masks

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return str(request.param)


def random_words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape).to(torch.int32)


@pytest.mark.parametrize(("num_slots", "num_words"), [(1, 1), (9, 33), (5, 1024), (257, 4748)])
def test_rows(num_slots: int, num_words: int, device: str) -> None:
    table = random_words(num_slots, num_words)
    inside = torch.randperm(num_slots)[: (num_slots + 1) // 2].tolist()
    slots = [-1, *inside, num_slots, 2**31 - 1, -(2**31)]
    masks = random_words(len(slots), num_words)
    run = torch.cat((masks.flatten(), torch.tensor(slots, dtype=torch.int32), random_words(7)))
    wanted = table.clone()
    for mask, slot in zip(masks, slots, strict=True):
        if slot in inside:
            wanted[slot] = mask
    found = table.to(device)
    write_masks(run.to(device), len(slots), found)
    assert torch.equal(found.cpu(), wanted)
    write_masks(run.to(device), 0, found)
    assert torch.equal(found.cpu(), wanted)


def test_refusals() -> None:
    table = random_words(3, 5)
    with pytest.raises(ValueError, match=re.escape("run: got shape (11,), wanted at least 12 words in one row")):
        write_masks(random_words(11), 2, table)
    with pytest.raises(ValueError, match="table: got"):
        write_masks(random_words(12), 2, table.long())
    with pytest.raises(ValueError, match="run: got"):
        write_masks(random_words(12).long(), 2, table)
    with pytest.raises(ValueError, match="table: "):
        write_masks(random_words(20), 2, random_words(5, 3).T)


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_compile(capability: int) -> None:
    """One kernel, whatever the numbers of slots and masks."""
    with compiling_for(capability) as kernels:
        for num_slots, count in ((2, 1), (257, 64), (16, 16)):
            table = torch.empty(num_slots, 4748, dtype=torch.int32, device="meta")
            write_masks(torch.empty(count * 4749, dtype=torch.int32, device="meta"), count, table)
    assert len({kernel.hash for kernel in kernels}) == 1
    assert kernels[0].asm["cubin"]


def test_interpreted() -> None:
    rerun_interpreted(__file__)
