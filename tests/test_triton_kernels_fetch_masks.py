"""Masks get into the table to the bit for a step's rows that have one, and no other row of it changes."""

import pytest
import torch
from torch import Tensor

from interpreted import rerun_interpreted
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.fetch_masks import fetch_masks

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
    """The host's memory is read as it is when the kernel runs."""
    table, masks = random_words(num_slots, num_words), random_words(num_slots, num_words)
    held = torch.randint(0, 2, (num_slots,)).to(torch.int32) * random_words(num_slots)
    inside = torch.randperm(num_slots)[: (num_slots + 1) // 2].tolist()
    slots = torch.tensor([-1, *inside, num_slots, 2**31 - 1, -(2**31)], dtype=torch.int32)
    wanted = table.clone()
    for slot in inside:
        if held[slot]:
            wanted[slot] = masks[slot]
    found = table.to(device)
    written = [tensor.pin_memory() if device == "cuda" else tensor for tensor in (held, masks)]
    for _ in range(2):
        fetch_masks(slots.to(device), *written, found)
        assert torch.equal(found.cpu(), wanted)
        for slot in inside:  # another time with others
            masks_of_host = written[1]
            masks_of_host[slot] = random_words(num_words)
            if held[slot]:
                wanted[slot] = masks_of_host[slot]
    fetch_masks(slots[:0].to(device), *written, found)


def test_refusals() -> None:
    table, masks, held, slots = random_words(3, 5), random_words(3, 5), random_words(3), random_words(2)
    with pytest.raises(ValueError, match="held: got"):
        fetch_masks(slots, held[:2], masks, table)
    with pytest.raises(ValueError, match="masks: got"):
        fetch_masks(slots, held, masks[:, :4], table)
    with pytest.raises(ValueError, match="table: got"):
        fetch_masks(slots, held, masks, table.long())
    with pytest.raises(ValueError, match="slots: got"):
        fetch_masks(slots.long(), held, masks, table)
    with pytest.raises(ValueError, match="masks: "):
        fetch_masks(slots, held, random_words(5, 3).T, table)


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_compile(capability: int) -> None:
    """One kernel, whatever the numbers of slots and rows."""
    with compiling_for(capability) as kernels:
        for num_slots, num_rows in ((2, 1), (257, 64), (16, 16)):
            held, slots = (torch.empty(count, dtype=torch.int32, device="meta") for count in (num_slots, num_rows))
            table, masks = (torch.empty(num_slots, 4748, dtype=torch.int32, device="meta") for _ in range(2))
            fetch_masks(slots, held, masks, table)
    assert len({kernel.hash for kernel in kernels}) == 1
    assert kernels[0].asm["cubin"]


def test_interpreted() -> None:
    rerun_interpreted(__file__)
