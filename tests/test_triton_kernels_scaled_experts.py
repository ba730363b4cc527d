"""Products of tokens with experts' weights of eight bits and four, near what the numbers give that they stand for."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from covering import long
from interpreted import rerun_interpreted
from places import PLACES, Place
from scaled_weights import META, meant, mx, of_meta, on_meta, scaled, unrounded
from tercet.triton_kernels.clamped_gate import ClampedGate
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.expert_work import ExpertWork, deal_out
from tercet.triton_kernels.experts_placed import launch_placed
from tercet.triton_kernels.matmul_epilogue import STORE
from tercet.triton_kernels.matmul_experts import expert_tile, matmul_experts, matmul_experts_gated
from test_triton_kernels_experts import exact_rows

HAVE_GPU = torch.cuda.is_available()


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return Place.of(request)


@pytest.mark.parametrize("four", [False, True])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "each", "width", "inner", "groups"),
    [(7, 4, 2, 256, 128, 2), long(1, 8, 2, 128, 128, 1), long(33, 6, 3, 192, 64, 1)]
    + ([(64, 128, 8, 2048, 768, 6), (700, 8, 2, 1024, 896, 7), (2000, 16, 4, 512, 256, 4)] if HAVE_GPU else [])
    + ([(300, 4, 2, 448, 192, 3), (900, 4, 2, 384, 640, 5)] if HAVE_GPU else []),
)
def test_products(
    place: Place, tokens: int, num_experts: int, each: int, width: int, inner: int, groups: int, four: bool
) -> None:
    if four and (width % 128 or inner % 128):
        pytest.skip("no whole blocks of four bits")
    dtype = torch.float16 if four and place.dtype == torch.float32 else place.dtype
    x = place.random(tokens, width).to(dtype)
    experts = torch.stack([torch.randperm(num_experts)[:each] for _ in range(tokens)]).int()
    experts[tokens // 2 + 1 :] = num_experts  # as padding has
    gate_up = scaled(num_experts * 2 * inner, width, 1, dtype, place.device, four=four)
    down = scaled(num_experts * width, inner, groups, dtype, place.device, four=four)
    there = (experts.flatten() < num_experts).to(place.device)
    roundings = {torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 3e-2}[dtype]
    sorted_tile = expert_tile(tokens * each, num_experts, gate_up, deterministic=True)
    for tile in (expert_tile(1, 4, gate_up, down), sorted_tile):  # alone, but in the interpreter
        work = deal_out(experts.to(place.device), num_experts, tile)
        of_gate_up, of_down = (unrounded(w) if tile == 1 else meant(w) for w in (gate_up, down))
        both = exact_rows(x, of_gate_up.view(num_experts, -1, width), experts, each)
        gated = matmul_experts_gated(x, gate_up, work, each)
        exact = torch.nn.functional.silu(both[:, 0::2]) * both[:, 1::2]
        torch.testing.assert_close(gated[there].double(), exact[there], rtol=roundings, atol=roundings)
        curved = matmul_experts_gated(x, gate_up, work, each, gelu=True)
        exact = torch.nn.functional.gelu(both[:, 0::2], approximate="tanh") * both[:, 1::2]
        torch.testing.assert_close(curved[there].double(), exact[there], rtol=roundings, atol=roundings)
        squared = matmul_experts(x, gate_up, work, squared_each=each)
        exact = both.relu().square()
        torch.testing.assert_close(squared[there].double(), exact[there], rtol=roundings, atol=roundings)
        given = torch.where(there[:, None], gated, float("nan"))
        exact = exact_rows(given, of_down.view(num_experts, -1, inner), experts, 1)
        projected = matmul_experts(given, down, work)
        torch.testing.assert_close(projected[there].double(), exact[there], rtol=roundings, atol=roundings)
    if place.device == "cuda" and torch.cuda.get_device_capability()[0] == 9:  # in plain order
        for _ in range(10):
            assert torch.equal(
                matmul_experts_gated(x, gate_up, work, each)[there],
                matmul_experts_gated(x, meant(gate_up).view(num_experts, -1, width), work, each)[there],
            )


@pytest.mark.skipif(not INTERPRETED, reason="others run it as it is launched")
@pytest.mark.parametrize("four", [False, True])
@pytest.mark.parametrize("tile", [16, 32])
def test_tiles_by_the_copy_engine(tile: int, four: bool) -> None:
    """Of a card that has none, too: rows of weights that fill no tile, the last block of columns not whole."""
    tokens, num_experts, each, inner, width = 9, 3, 2, 136, 192
    columns = 256 if four else width
    x = torch.randn(tokens, columns).half()
    experts = torch.stack([torch.randperm(num_experts)[:each] for _ in range(tokens)]).int()
    experts[tokens // 2 + 1 :] = num_experts
    w = scaled(num_experts * inner, columns, columns // 128 or 1, torch.float16, "cpu", four=four)
    work = deal_out(experts, num_experts, tile)
    out = torch.full((tokens * each, inner), float("nan")).half()
    fixed = {"bias_ptr": x, "limit": 0.0, "slope": 0.0, "out_ptr": out, "PER_ROW": each, "N": inner}
    fixed |= {"K": w.stored_columns, "EPILOGUE": STORE.value, "BLOCK_M": tile, "PDL": False}
    launch_placed(x, w, work, fixed)
    there = experts.flatten() < num_experts
    exact = exact_rows(x, meant(w).view(num_experts, inner, columns), experts, each)
    torch.testing.assert_close(out[there].double(), exact[there], rtol=6e-3, atol=6e-3)
    assert out[~there].isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not HAVE_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("tokens", "num_experts", "each", "width", "inner"),
    [
        (1, 32, 4, 2880, 2880),
        (7, 4, 2, 96, 160),
        (33, 6, 3, 128, 2080),
        (64, 128, 4, 2880, 1440),
        (900, 4, 2, 416, 608),
        (300, 32, 4, 2880, 2880),
        (2500, 4, 2, 1056, 320),
    ],
)
def test_products_in_mxfp4(tokens: int, num_experts: int, each: int, width: int, inner: int) -> None:
    """Without a gate; the same bits as with plain weights."""
    x = torch.randn(tokens * each, width, device="cuda").bfloat16()
    experts = torch.stack([torch.randperm(num_experts)[:each] for _ in range(tokens)]).int()
    experts[tokens // 2 + 1 :] = num_experts  # as padding has
    there = (experts.flatten() < num_experts).cuda()
    gate_up, down = mx(num_experts * 2 * inner, width, "cuda"), mx(num_experts * width, inner, "cuda")
    sorted_tile = expert_tile(tokens * each, num_experts, gate_up, deterministic=True)
    for tile in (1, sorted_tile):
        work = deal_out(experts.cuda(), num_experts, tile)
        own = meant(gate_up).view(num_experts, -1, width)
        projected = matmul_experts(x, gate_up, work)
        exact = exact_rows(x, own, experts, 1)
        torch.testing.assert_close(projected[there].double(), exact[there], rtol=3e-2, atol=3e-2)
        given = torch.where(there[:, None], projected[:, :inner], float("nan")).contiguous()
        others = meant(down).view(num_experts, -1, inner)
        back = matmul_experts(given, down, work)
        exact = exact_rows(given, others, experts, 1)
        torch.testing.assert_close(back[there].double(), exact[there], rtol=3e-2, atol=3e-2)
        if tile > 1 and torch.cuda.get_device_capability()[0] == 9:  # in plain order
            assert torch.equal(projected[there], matmul_experts(x, own, work)[there])
            assert torch.equal(back[there], matmul_experts(given, others, work)[there])


@pytest.mark.skipif(INTERPRETED, reason="none are alone there")
def test_few_pairs_of_mxfp4_are_alone() -> None:
    w = on_meta(mx(128 * 2, 64))
    assert [pairs for pairs in range(1, 65) if expert_tile(pairs, 128, w, w) == 1] == list(range(1, 9))
    assert expert_tile(8, 15, w, w) > 1


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(
    ("pairs_each", "tile", "names"),
    [(12, 16, ["_place", "placed_experts"]), (32, 32, ["_place", "placed_experts"]), (33, 64, ["experts_groups"])],
)
def test_tiles_of_mxfp4(pairs_each: int, tile: int, names: list[str]) -> None:
    x, w = torch.empty(pairs_each, 256, dtype=torch.bfloat16, device=META), on_meta(mx(2 * 256, 256))
    with compiling_for(90) as kernels:
        assert expert_tile(2 * pairs_each, 2, w) == tile
        pairs, experts = (torch.empty(size, dtype=torch.int32, device=META) for size in (8 * tile, 8))
        matmul_experts_gated(x, w, ExpertWork(pairs, experts, tile, 2), 2)
    assert [kernel.metadata.name for kernel in kernels] == [f"{name}_kernel" for name in names]


def test_bad_input() -> None:
    work = deal_out(torch.zeros(2, 1, dtype=torch.int32), 4, 16)

    def multiply(rows: int) -> Tensor:
        return matmul_experts_gated(torch.zeros(2, 64), scaled(rows, 64, 1, torch.float32), work, 1)

    for columns, dtype in ((64, torch.float16), (40, torch.bfloat16)):
        with pytest.raises(ValueError, match=f"w: got {columns} columns of MXFP4 for {dtype}, wanted those of experts"):
            matmul_experts(torch.zeros(2, columns, dtype=dtype), mx(8, columns), work)
    with pytest.raises(ValueError, match="w: got 7 rows, wanted as many for each of 4 experts"):
        multiply(7)
    with pytest.raises(ValueError, match="w: got 3 rows, wanted gate and up rows in turns"):
        multiply(12)


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize(("tile", "four"), [(16, True), (32, True), (64, False), (128, False)])
def test_compile(tile: int, four: bool, capability: int) -> None:
    x = torch.empty(64, 2048, dtype=torch.bfloat16, device=META)
    pairs, experts = (torch.empty(size, dtype=torch.int32, device=META) for size in (32 * tile, 32))
    with compiling_for(capability) as kernels:
        matmul_experts_gated(x, of_meta(16 * 1536, 2048, 16, four=four), ExpertWork(pairs, experts, tile, 16), 8)
    check_tiles(kernels[-1], capability, "8" if four else "4")


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize("tile", [16, 32, 128])
def test_compile_mxfp4(tile: int, capability: int) -> None:
    """Of columns that fill no block."""
    x = torch.empty(64, 2080, dtype=torch.bfloat16, device=META)
    pairs, experts = (torch.empty(size, dtype=torch.int32, device=META) for size in (32 * tile, 32))
    with compiling_for(capability) as kernels:
        matmul_experts(x, on_meta(mx(16 * 96, 2080)), ExpertWork(pairs, experts, tile, 16))
    check_tiles(kernels[-1], capability, "4")


def check_tiles(kernel: Any, capability: int, together: str) -> None:
    assert kernel.asm["cubin"]
    if capability == 89:  # operands lie as `dealt_columns` says
        assert set(re.findall(r"kWidth = (\d+)", kernel.asm["ttgir"])) == {together}
    waits = [line for line in kernel.asm["ttgir"].splitlines() if "warp_group_dot_wait" in line]
    assert bool(waits) == (capability == 90)
    assert all("pendings = 0" in line for line in waits)


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(
    ("capability", "four", "most"), [(80, True, 128), (89, False, 128), (90, False, 64), (90, True, 32)]
)
def test_compile_alone(capability: int, four: bool, most: int) -> None:
    x, experts = torch.empty(3, 768, dtype=torch.bfloat16, device=META), torch.empty(24, dtype=torch.int32, device=META)
    with compiling_for(capability) as kernels:
        w = of_meta(128 * 1002, 768, 6, four=four)
        assert [expert_tile(pairs, 128, w) == 1 for pairs in (32, 33, 64, 65)] == [True, most > 32, most > 32, False]
        assert [expert_tile(pairs, 512, w) == 1 for pairs in (most, most + 1)] == [True, most == 128]
        assert [expert_tile(24, 128, w, again=pairs) == 1 for pairs in (6, 7)] == [True, False]
        work = ExpertWork(None, experts, 1, 128)
        gated = matmul_experts_gated(x, w, work, 8)
        matmul_experts(x.new_empty(24, 768), w, work)
        matmul_experts_gated(x, w, work, 8, ClampedGate(x.new_empty(128, 1002), 7.0, 1.7))
    assert gated.shape == (24, 501)
    assert [kernel.metadata.name for kernel in kernels] == ["experts_vector_scaled_kernel"] * 3
    # First products alone wait for who was chosen before they load weights, whatever gate is at their end.
    ahead = ["ld.global" in kernel.asm["ptx"].partition("griddepcontrol.wait")[0] for kernel in kernels]
    assert ahead == [capability < 90, True, capability < 90]


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(
    ("capability", "pairs_each", "names"),
    [
        (90, 8, ["_place", "placed_experts"]),
        (90, 32, ["_place", "placed_experts"]),
        (90, 33, ["experts_groups"]),
        (90, 1000, ["experts_groups"]),
        (89, 192, ["scaled_experts"]),
        (89, 200, ["_expand", "experts"]),
    ],
)
def test_how_many_pairs_read_weights(capability: int, pairs_each: int, names: list[str]) -> None:
    """Few by tiles, many by warp groups, or expanded where there are none."""
    x, w = torch.empty(pairs_each, 256, dtype=torch.bfloat16, device=META), of_meta(2 * 256, 256, 2)
    with compiling_for(capability) as kernels:
        tile = expert_tile(2 * pairs_each, 2, w)
        pairs, experts = (torch.empty(size, dtype=torch.int32, device=META) for size in (8 * tile, 8))
        matmul_experts_gated(x, w, ExpertWork(pairs, experts, tile, 2), 2)
    assert [kernel.metadata.name for kernel in kernels] == [f"{name}_kernel" for name in names]


def test_interpreted() -> None:
    rerun_interpreted(__file__)
