"""What adapters add to a product against float64, and which adapter a token has against a loop over a step's rows."""

from random import Random

import pytest
import torch
from torch import Tensor

from covering import covering, long
from interpreted import rerun_interpreted
from places import PLACES, ROUNDING, Place
from tercet.triton_kernels.add_low_rank import Addition
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.low_rank import LowRank, Norm
from tercet.triton_kernels.matmul import matmul
from tercet.triton_kernels.overlap import next_starts_late
from tercet.triton_kernels.prepare import StepInputs
from tercet.triton_kernels.row_groups import NO_TILE, group_rows
from tercet.triton_kernels.token_adapters import token_adapters

HAVE_GPU = torch.cuda.is_available()
MANY = 1100 if HAVE_GPU else 530
"""More than from where on tiles are higher."""


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return Place.of(request)


def matrices(
    place: Place, num_adapters: int, rank: int, num_out: int, num_in: int, starts: tuple[int, ...] = (0,)
) -> LowRank:
    down = (place.random(num_adapters, len(starts) * rank, num_in).float() / num_in**0.5).to(place.dtype)
    return LowRank(down, place.random(num_adapters, num_out, rank), starts)


def add(
    y: Tensor,
    x: Tensor,
    low_rank: LowRank,
    adapters: Tensor,
    norm: Norm | None = None,
    *,
    gate: bool = False,
    deterministic: bool = False,
) -> Tensor:
    groups = group_rows(adapters, len(low_rank), deterministic=deterministic)
    return Addition(x, low_rank, groups, norm).to(y, gate=gate)


def wanted_sum(y: Tensor, x: Tensor, low_rank: LowRank, adapters: list[int]) -> Tensor:
    """Row by row, column by column."""
    wanted, rank = y.double(), low_rank.up_ANQ.shape[2]
    columns = torch.arange(y.shape[1])
    if low_rank.starts == (0, 1):
        modules = columns % 2
    else:
        modules = torch.bucketize(columns, torch.tensor(low_rank.starts[1:]), right=True)
    for row, adapter in enumerate(adapters):
        if adapter >= 0:
            low = (low_rank.down_ARK[adapter].double() @ x[row].double()).to(x.dtype).double()
            own = low.unflatten(0, (-1, rank))[modules.to(low.device)]
            wanted[row] += (low_rank.up_ANQ[adapter].double() * own).sum(1)
    return wanted


def normed(x: Tensor, norm: Norm) -> Tensor:
    wide = x.double()
    return (wide * (wide.square().mean(1, keepdim=True) + norm.eps).rsqrt() * norm.weight_K.double()).to(x.dtype)


@pytest.mark.parametrize(
    ("num_rows", "num_adapters", "rank", "num_out", "num_in", "starts"),
    [
        long(1, 1, 16, 64, 96, (0,)),
        (1, 5, 16, 384, 1100, (0, 200, 300)),
        (5, 3, 32, 200, 576, (0, 1)),
        long(33, 20, 16, 130, 100, (0, 100)),
        (16, 6, 48, 96, 1000, (0, 32, 64)),
        (1, 3, 16, 300, 130, (0, 100, 270, 290)),
        (6, 3, 16, 300, 130, (0, 200, 210, 230)),
        (70, 2, 128, 257, 129, (0,)),
        long(MANY, 3, 16, 72, 80, (0, 1)),
        (MANY, 2, 32, 144, 130, (0, 20, 50)),
    ],
)
def test_rows_get_what_their_adapters_make_of_them(
    place: Place, num_rows: int, num_adapters: int, rank: int, num_out: int, num_in: int, starts: tuple[int, ...]
) -> None:
    low_rank = matrices(place, num_adapters, rank, num_out, num_in, starts)
    adapters = [Random(row).randrange(-1, num_adapters) for row in range(num_rows)]
    if num_rows > 1:
        adapters[:2] = num_adapters - 1, -1
    x, before = place.random(num_rows, num_in), place.random(num_rows, num_out)
    x[[adapter < 0 for adapter in adapters]] = float("nan")  # nobody reads these
    y = before.clone()
    assert add(y, x, low_rank, place.ints(adapters)) is y
    bare = [row for row, adapter in enumerate(adapters) if adapter < 0]
    assert torch.equal(y[bare], before[bare])
    wanted = wanted_sum(before, x, low_rank, adapters)
    # The number between the products may be rounded the other way, where sums in another order are next to a half.
    slack = 3 * ROUNDING[place.dtype]
    torch.testing.assert_close(y.double(), wanted, rtol=slack, atol=slack * rank**0.5)
    part = before.float()  # a part of a product's sum is not rounded
    add(part, x, low_rank, place.ints(adapters))
    torch.testing.assert_close(part.double(), wanted, rtol=slack, atol=slack * rank**0.5)


@pytest.mark.parametrize("num_rows", [1, 6, long(40), MANY])
def test_a_gate_has_the_rounded_sum(place: Place, num_rows: int) -> None:
    low_rank = matrices(place, 3, 16, 300, 600, (0, 1))
    adapters = [Random(row).randrange(-1, 3) for row in range(num_rows)]
    x, y = place.random(num_rows, 600), place.random(num_rows, 300)
    rounded = y.clone()
    add(rounded, x, low_rank, place.ints(adapters))
    before = y.clone()
    got = add(y, x, low_rank, place.ints(adapters), gate=True)
    assert torch.equal(y, before) or place.device == "cpu"
    gate, up = rounded.double()[:, ::2], rounded.double()[:, 1::2]
    place.check_rounded(got, gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("num_rows", [1, 7, long(16)])
def test_rows_may_be_normed_on_their_way(place: Place, num_rows: int) -> None:
    low_rank = matrices(place, 2, 32, 100, 1030)
    adapters = [Random(row).randrange(2) for row in range(num_rows)]
    x, before = place.random(num_rows, 1030) * 3, place.random(num_rows, 100)
    norm = Norm(place.random(1030), 1e-5)
    y = add(before.clone(), x, low_rank, place.ints(adapters), norm=norm)
    wanted = wanted_sum(before, normed(x, norm), low_rank, adapters)
    slack = 6 * ROUNDING[place.dtype]
    torch.testing.assert_close(y.double(), wanted, rtol=slack, atol=slack * 32**0.5)


@pytest.mark.skipif(not HAVE_GPU, reason="needs a CUDA device")
@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 3, 16, 64, 300, 1000])
def test_beside_a_product_in_a_graph(num_rows: int) -> None:
    """The first kernel reads what is written right ahead of the product, and the second what that makes: each time."""
    place = Place("cuda", torch.bfloat16)
    low_rank = matrices(place, 3, 16, 4096, 2048)
    before, weight = place.random(2048, 2048) / 45, place.random(4096, 2048) / 45
    adapters = [Random(row).randrange(-1, 3) for row in range(num_rows)]
    first, indices = place.random(num_rows, 2048), place.ints(adapters)

    def step() -> tuple[Tensor, Tensor]:
        x = matmul(first, before)
        addition = Addition(x, low_rank, group_rows(indices, 3, deterministic=False))
        with next_starts_late():
            y = matmul(x, weight)
        return x, addition.to(y)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = [step() for _ in range(20)]
    for _ in range(20):
        for x, y in made:
            x.fill_(float("nan"))
            y.fill_(float("nan"))
        first.copy_(place.random(num_rows, 2048))
        graph.replay()
        x, y = made[0]
        for _, other in made[1:]:
            assert torch.equal(other, y)
    wanted = wanted_sum(x.double() @ weight.double().t(), x, low_rank, adapters)
    torch.testing.assert_close(y.double(), wanted, rtol=0.02, atol=0.1)


def test_a_row_has_the_bits_that_it_has_alone(place: Place) -> None:
    low_rank = matrices(place, 4, 32, 150, 800, (0, 1))
    rows = MANY
    adapters = torch.randint(-1, 4, (rows,), dtype=torch.int32, device=place.device)
    x, before = place.random(rows, 800), place.random(rows, 150)
    for gate in (False, True):
        y = add(before.clone(), x, low_rank, adapters, deterministic=True, gate=gate)
        for row in (0, 17, rows - 1):
            one = slice(row, row + 1)
            alone = add(before[one].clone(), x[one], low_rank, adapters[one], deterministic=True, gate=gate)
            if place.device == "cpu" and place.dtype == torch.float32:  # in PyTorch sums follow the batch
                torch.testing.assert_close(alone, y[one], rtol=1e-5, atol=1e-4)
            else:
                assert torch.equal(alone, y[one]), row


@pytest.mark.parametrize("wrong", ["x", "y", "rank", "norm"])
def test_what_does_not_fit_is_refused(wrong: str) -> None:
    place = Place("cpu", torch.float32)
    low_rank = matrices(place, 2, 24 if wrong == "rank" else 16, 40, 50)
    x = place.random(3, 49 if wrong == "x" else 50)
    y = place.random(4 if wrong == "y" else 3, 40)
    adapters = place.ints([0, 1, -1])
    norm = Norm(place.random(51), 1e-6) if wrong == "norm" else None
    with pytest.raises(ValueError, match=f"^{'down' if wrong == 'rank' else wrong}: got"):
        add(y, x, low_rank, adapters, norm=norm)


@pytest.mark.parametrize(
    ("num_rows", "num_adapters"), [(0, 1), (1, 1), (1, 300), (2, 1), (17, 3), (40, 500), (512, 2), (513, 7), (1400, 90)]
)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("few", [False, True])
def test_each_row_is_in_a_tile_of_its_adapter(
    place: Place, num_rows: int, num_adapters: int, deterministic: bool, few: bool
) -> None:
    """In their order, tiles as full as can be, and no tile behind those."""
    if place.device == "cpu" and INTERPRETED and num_rows > 600:
        num_rows = 520
    kinds = min(2, num_adapters) if few else num_adapters
    adapters = [Random(row).randrange(-1, kinds) for row in range(num_rows)]
    groups = group_rows(place.ints(adapters), num_adapters, deterministic=deterministic)
    assert groups.adapters_T.tolist() == adapters
    height = groups.rows_BMH.shape[2]
    assert height == (64 if num_rows > 512 and not deterministic else 16)
    for block, (rows_MH, of_tiles) in enumerate(
        zip(groups.rows_BMH.tolist(), groups.adapters_BM.tolist(), strict=True)
    ):
        own = range(block * 512, min(num_rows, block * 512 + 512))
        wanted = [
            (adapter, [row for row in own if adapters[row] == adapter])
            for adapter in sorted({adapters[row] for row in own})
        ]
        tiles = [(adapter, rows[at : at + height]) for adapter, rows in wanted for at in range(0, len(rows), height)]
        count = len(tiles)
        got = list(zip(of_tiles, rows_MH, strict=True))
        assert [(adapter, [row for row in rows if row >= 0]) for adapter, rows in got[:count]] == tiles
        assert all(rows == sorted(rows, key=lambda row: row < 0) for _, rows in got[:count])
        assert all(adapter == NO_TILE.value for adapter, _ in got[count:])


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
        kv_slots_XT=place.ints([0] * num_tokens, torch.int64)[None],
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
    assert (of_rows is of_tokens) == (not chunks)  # then they are grouped once
    assert of_tokens.tolist() == [adapters[slot] for slot in slots] + [-1] * padded
    rows = [*decodes, *(slot for slot, _ in chunks)] if chunks else slots
    assert of_rows.tolist() == [adapters[slot] for slot in rows]


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@covering(1, capability=[90, 89, 80], dtype=[torch.bfloat16, torch.float16, torch.float32])
def test_kernels_compile_once_for_all_numbers_of_rows(capability: int, dtype: torch.dtype) -> None:
    """But that there are tiles of several heights."""
    like = {"dtype": dtype, "device": "meta"}
    low_rank = LowRank(torch.empty(3, 48, 4096, **like), torch.empty(3, 6144, 16, **like), (0, 4096, 5120))
    with compiling_for(capability) as kernels:
        for rows in (1, 7, 20, 64, 500, 1000, 8192):
            adapters = torch.empty(rows, dtype=torch.int32, device="meta")
            x, y = torch.empty(rows, 4096, **like), torch.empty(rows, 6144, **like)
            add(y, x, low_rank, adapters)
    assert len({kernel.hash for kernel in kernels}) == 9
    for kernel in kernels:
        assert kernel.asm["cubin"]
        waits = capability == 90 and "_group_rows_kernel" not in kernel.asm["ptx"]
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == waits


def test_in_the_interpreter() -> None:
    rerun_interpreted(__file__)
