"""What adapters add to a product against float64, and which adapter a token has against a loop over a step's rows."""

from random import Random

import pytest
import torch
from torch import Tensor

from interpreted import rerun_interpreted
from places import PLACES, ROUNDING, Place
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.low_rank import LowRank, add_low_rank
from tercet.triton_kernels.prepare import StepInputs
from tercet.triton_kernels.token_adapters import token_adapters

HAVE_GPU = torch.cuda.is_available()
MANY = 1100 if HAVE_GPU else 530
"""More than from where on tiles are higher."""


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return Place.of(request)


def matrices(place: Place, num_adapters: int, rank: int, num_out: int, num_in: int) -> LowRank:
    down = (place.random(num_adapters, rank, num_in).float() / num_in**0.5).to(place.dtype)
    return LowRank(down, place.random(num_adapters, num_out, rank))


def wanted_sum(y: Tensor, x: Tensor, low_rank: LowRank, adapters: list[int]) -> Tensor:
    wanted = y.double()
    for row, adapter in enumerate(adapters):
        if adapter >= 0:
            low = (low_rank.down_ARK[adapter].double() @ x[row].double()).to(y.dtype)
            wanted[row] += low_rank.up_ANR[adapter].double() @ low.double()
    return wanted


@pytest.mark.parametrize(
    ("num_rows", "num_adapters", "rank", "num_out", "num_in"),
    [
        (1, 1, 16, 64, 96),
        (5, 3, 32, 200, 576),
        (33, 20, 16, 130, 100),
        (16, 16, 48, 96, 1000),
        (70, 2, 128, 257, 129),
        (MANY, 3, 16, 72, 80),
    ],
)
def test_rows_get_what_their_adapters_make_of_them(
    place: Place, num_rows: int, num_adapters: int, rank: int, num_out: int, num_in: int
) -> None:
    low_rank = matrices(place, num_adapters, rank, num_out, num_in)
    adapters = [Random(row).randrange(-1, num_adapters) for row in range(num_rows)]
    if num_rows > 1:
        adapters[:2] = num_adapters - 1, -1
    x, before = place.random(num_rows, num_in), place.random(num_rows, num_out)
    x[[adapter < 0 for adapter in adapters]] = float("nan")  # nobody reads these
    y = before.clone()
    add_low_rank(y, x, low_rank, place.ints(adapters))
    bare = [row for row, adapter in enumerate(adapters) if adapter < 0]
    assert torch.equal(y[bare], before[bare])
    wanted = wanted_sum(before, x, low_rank, adapters)
    # The number between the products may be rounded the other way, where sums in another order are next to a half.
    slack = 3 * ROUNDING[place.dtype]
    torch.testing.assert_close(y.double(), wanted, rtol=slack, atol=slack * rank**0.5)


def test_a_row_has_the_bits_that_it_has_alone(place: Place) -> None:
    low_rank = matrices(place, 4, 32, 150, 300)
    rows = MANY
    adapters = torch.randint(-1, 4, (rows,), dtype=torch.int32, device=place.device)
    x, before = place.random(rows, 300), place.random(rows, 150)
    y = before.clone()
    add_low_rank(y, x, low_rank, adapters, deterministic=True)
    for row in (0, 1, 17, rows // 2, rows - 1):
        alone = before[row : row + 1].clone()
        add_low_rank(alone, x[row : row + 1], low_rank, adapters[row : row + 1], deterministic=True)
        if place.device == "cpu" and place.dtype == torch.float32:  # in PyTorch sums follow the batch
            torch.testing.assert_close(alone, y[row : row + 1])
        else:
            assert torch.equal(alone, y[row : row + 1]), row


@pytest.mark.parametrize("wrong", ["x", "y", "adapters", "rank"])
def test_what_does_not_fit_is_refused(wrong: str) -> None:
    place = Place("cpu", torch.float32)
    low_rank = matrices(place, 2, 24 if wrong == "rank" else 16, 40, 50)
    x = place.random(3, 49 if wrong == "x" else 50)
    y = place.random(4 if wrong == "y" else 3, 40)
    adapters = place.ints([0, 1] if wrong == "adapters" else [0, 1, -1][: len(y)] + [0] * (len(y) - 3))
    with pytest.raises(ValueError, match=f"^{'down' if wrong == 'rank' else wrong if wrong != 'y' else 'x'}: got"):
        add_low_rank(y, x, low_rank, adapters)


@pytest.mark.parametrize(
    ("decodes", "tries", "chunks", "padded"),
    [
        ([3, 0, 2], 1, [], 0),
        ([1, 4, 0, 2], 5, [], 0),
        ([], 1, [(2, 70)], 58),
        ([5, 1], 1, [(0, 3), (2, 0), (4, 130), (5, 1)], 26),
    ],
)
def test_tokens_have_the_adapters_of_their_slots(
    place: Place, decodes: list[int], tries: int, chunks: list[tuple[int, int]], padded: int
) -> None:
    """The last slot is the dummy."""
    adapters = [2, -1, 0, 7, -1, -1]
    slots = [slot for slot in decodes for _ in range(tries)]
    slots += [slot for slot, length in chunks for _ in range(length)]
    starts = [sum(length for _, length in chunks[:index]) for index in range(len(chunks) + 1)]
    num_tokens = len(slots) + padded
    none = place.ints([])
    inputs = StepInputs(
        input_ids_T=place.ints([0] * num_tokens),
        positions_T=place.ints([0] * num_tokens),
        kv_slots_T=place.ints([0] * num_tokens, torch.int64),
        decode_slots_B=place.ints(decodes),
        decode_lengths_B=none,
        chunk_slots_C=place.ints([slot for slot, _ in chunks]),
        chunk_starts_C=none,
        query_starts_C1=place.ints(starts),
        sample_rows_R=none,
        num_tokens_1=place.ints([len(slots)]),
        tries=tries,
    )
    of_tokens, of_rows = token_adapters(inputs, place.ints(adapters))
    assert of_tokens.tolist() == [adapters[slot] for slot in slots] + [-1] * padded
    rows = [*decodes, *(slot for slot, _ in chunks)] if chunks else slots
    assert of_rows.tolist() == [adapters[slot] for slot in rows]


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_compile_once_for_all_numbers_of_rows(capability: int, dtype: torch.dtype) -> None:
    """But that there are tiles for few rows and for many."""
    like = {"dtype": dtype, "device": "meta"}
    low_rank = LowRank(torch.empty(3, 48, 4096, **like), torch.empty(3, 6144, 48, **like))
    with compiling_for(capability) as kernels:
        for rows in (1, 7, 64, 500, 1000, 8192):
            adapters = torch.empty(rows, dtype=torch.int32, device="meta")
            x, y = torch.empty(rows, 4096, **like), torch.empty(rows, 6144, **like)
            add_low_rank(y, x, low_rank, adapters)
    assert len({kernel.hash for kernel in kernels}) == 4
    for kernel in kernels:
        assert kernel.asm["cubin"]
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (capability == 90)


def test_in_the_interpreter() -> None:
    rerun_interpreted(__file__)
