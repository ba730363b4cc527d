"""Products of rows and weights that both have eight bits: which weights and rows may, and that kernels compile."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from covering import long
from scaled_weights import META, scaled, with_blocks
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.choose_fp8 import _TILES, _TILES_OF_ROWS, _Tile, choose_fp8
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED, Gpu, pretending
from tercet.triton_kernels.expert_work import deal_out
from tercet.triton_kernels.matmul import matmul, matmul_add
from tercet.triton_kernels.matmul_experts import expert_tile, matmul_experts, matmul_experts_gated
from tercet.triton_kernels.matmul_launch import launch_matmul
from tercet.triton_kernels.matmul_parts import matmul_parts
from tercet.triton_kernels.scaled_weight import ScaledWeight, with_tile_scales

H200 = Gpu("NVIDIA H200", 90, 132)


def weight(N: int, K: int, groups: int) -> ScaledWeight:
    """On the card that is meant."""
    numbers = torch.empty(N, K, dtype=FP8, device=META)
    return with_tile_scales(ScaledWeight(numbers, torch.empty(groups, N, device=META), torch.bfloat16))


def meta(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device=META)


@pytest.mark.parametrize(("N", "groups", "group"), [(384, 4, 128), (200, 2, 256), (64, 3, 128)])
def test_scales_of_tiles(N: int, groups: int, group: int) -> None:
    w = with_blocks(scaled(N, groups * group, groups, torch.bfloat16))
    assert w.tile_scales is not None
    for row in range(N):
        for column in range(0, w.shape[1], 128):
            assert w.tile_scales[row // 128, column // 128, row % 2] == w.scales_GN[column // group, row]
    other = w.scales_GN.clone()
    other[-1, -1] *= 2
    assert with_tile_scales(replace(w, scales_GN=other, tile_scales=None)).tile_scales is None
    assert w[:64].tile_scales is None


@pytest.mark.parametrize(("N", "K", "groups"), [(128, 192, 1), (100, 256, 2), (128, 256, 4)])
def test_other_scales(N: int, K: int, groups: int) -> None:
    """Columns that are no multiple of 128, rows that are none of 8, groups of 64 columns."""
    assert with_tile_scales(scaled(N, K, groups, torch.bfloat16)).tile_scales is None


def test_scales_of_rows() -> None:
    w = with_tile_scales(scaled(136, 256, 1, torch.bfloat16))
    assert w.tile_scales is not None
    assert torch.equal(w.tile_scales, w.scales_GN[0])


def test_which_rows_are_rounded() -> None:
    w = weight(4096, 4096, 32)
    with pretending(H200):
        for groups, fewest in ((32, 33), (1, 65)):
            assert choose_fp8(meta(fewest - 1, 4096), weight(4096, 4096, groups)) is None
            assert choose_fp8(meta(fewest, 4096), weight(4096, 4096, groups)) is not None
        assert choose_fp8(meta(300, 4096), replace(w, tile_scales=None)) is None
        assert choose_fp8(meta(300, 16384), weight(1024, 16384, 1)) is not None
        assert choose_fp8(meta(300, 16512), weight(1024, 16512, 1)) is None
        assert choose_fp8(meta(300, 16512), weight(1024, 16512, 129)) is not None
    with pretending(Gpu("NVIDIA L40S", 89, 142)):
        assert choose_fp8(meta(4096, 4096), w) is None


@pytest.mark.skipif(INTERPRETED, reason="compiles")
def test_launches() -> None:
    """Rows are rounded where nothing is deterministic, and where a kernel can send them out."""
    w = weight(1024, 4096, 32)
    for rows, deterministic, wanted in ((300, False, True), (300, True, False), (16, False, False)):
        with compiling_for(H200) as kernels:
            matmul(meta(rows, 4096), w, deterministic=deterministic)
            matmul_add(meta(rows, 4096), w, meta(rows, 1024), deterministic=deterministic)
            assert not wanted or matmul_parts(meta(rows, 4096), w) is None
        assert ("fp8_kernel" in {kernel.name for kernel in kernels}) == wanted
        assert ("_round_rows_kernel" in {kernel.name for kernel in kernels}) == wanted


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(
    ("tile", "epilogue"),
    [
        (_TILES[0], "gate"),
        (_TILES[2], "add"),
        (_TILES[3], "store"),
        (_TILES_OF_ROWS[1], "store"),
        (_TILES_OF_ROWS[3], "add"),
        *(long(tile, epilogue) for tile in (*_TILES, *_TILES_OF_ROWS) for epilogue in ("store", "add", "gate")),
    ],
)
def test_compiles(tile: _Tile, epilogue: str) -> None:
    of_rows = tile in _TILES_OF_ROWS
    out = meta(300, 512 if epilogue == "gate" else 1024)
    bias = meta(1024) if epilogue == "store" else None
    with compiling_for(90) as kernels:
        counted = torch.empty(1, dtype=torch.int32, device=META)
        launch_matmul(
            tile.config, meta(300, 4096), weight(1024, 4096, 1 if of_rows else 32), out, epilogue, bias, rows=counted
        )
    names = ["_round_whole_rows_kernel", "hopper_kernel"] if of_rows else ["_round_rows_kernel", "fp8_kernel"]
    assert [kernel.name for kernel in kernels] == names
    assert "wgmma.mma_async.sync.aligned.m64n" in kernels[1].asm["ptx"]
    assert ".e4m3.e4m3" in kernels[1].asm["ptx"]


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(("tokens", "groups"), [(1024, 16), long(1024, 1), (256, 16)])
def test_experts(tokens: int, groups: int) -> None:
    """Rows of many pairs are rounded."""
    E, K, F, each = 16, 2048, 768, 4
    first, second = weight(E * 2 * F, K, groups), weight(E * K, F, 6 if groups > 1 else 1)
    with compiling_for(H200) as kernels:
        tile = expert_tile(tokens * each, E, first, second)
        work = deal_out(torch.empty(tokens, each, dtype=torch.int32, device=META), E, tile)
        matmul_experts(matmul_experts_gated(meta(tokens, K), first, work, each), second, work)
        matmul_experts_gated(meta(tokens, K), first, work, each, gelu=True)
    names = [kernel.name for kernel in kernels]
    kernel = (
        "experts_groups_kernel" if tokens == 256 else "experts_fp8_kernel" if groups > 1 else "experts_hopper_kernel"
    )
    assert names.count(kernel) == 3
    assert ("_round_rows_kernel" in names or "_round_whole_rows_kernel" in names) == (tokens > 256)
