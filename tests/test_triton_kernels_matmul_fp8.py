"""Products of rows and weights that both have eight bits: which weights and rows may, and that kernels compile."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from covering import long
from scaled_weights import META, scaled, with_blocks
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.choose_fp8 import _TILES, choose_fp8
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED, Gpu, pretending
from tercet.triton_kernels.matmul import matmul, matmul_add
from tercet.triton_kernels.matmul_config import MatmulConfig
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
        assert choose_fp8(meta(128, 4096), w) is None
        assert choose_fp8(meta(129, 4096), w) is not None
        assert choose_fp8(meta(129, 4096), replace(w, tile_scales=None)) is None
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
@pytest.mark.parametrize("groups", [32, 1])
@pytest.mark.parametrize(
    ("config", "epilogue"),
    [
        (_TILES[0].config, "gate"),
        (_TILES[2].config, "add"),
        (_TILES[3].config, "store"),
        *(
            long(tile.config, epilogue)
            for tile in _TILES
            for epilogue in ("store", "add", "gate")
        ),
    ],
)  # fmt: skip
def test_compiles(config: MatmulConfig, epilogue: str, groups: int) -> None:
    """Without spills, which a report of the compiler's would have as a stack."""
    out = meta(300, 512 if epilogue == "gate" else 1024)
    bias = meta(1024) if epilogue == "store" else None
    with compiling_for(90) as kernels:
        counted = torch.empty(1, dtype=torch.int32, device=META)
        launch_matmul(config, meta(300, 4096), weight(1024, 4096, groups), out, epilogue, bias, rows=counted)
    assert [kernel.name for kernel in kernels] == ["_round_rows_kernel", "fp8_kernel"]
    assert "wgmma.mma_async.sync.aligned.m64n" in kernels[1].asm["ptx"]
    assert ".e4m3.e4m3" in kernels[1].asm["ptx"]
