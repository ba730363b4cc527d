"""The kernels of vision encoders compile for GPUs that are not here, at real sizes."""

import pytest
import torch
from triton.compiler import CompiledKernel

from covering import long
from tercet.triton_kernels import (
    axis_turns,
    clamp_into,
    cubic_positions,
    full_attention,
    gelu,
    grid_positions,
    head_norms,
    image_patches,
    image_rows,
    layer_norm,
    mean_rows,
    tile_rows,
    turn_rows,
)
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.matmul import matmul

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def check(kernel: CompiledKernel, capability: int) -> None:
    assert kernel.asm["cubin"]
    if capability == 90:
        assert "griddepcontrol.wait" in kernel.asm["ptx"]


@pytest.mark.parametrize(
    ("capability", "dim", "longest", "dtype"),
    [
        (90, 72, 4096, torch.bfloat16),
        (90, 80, 64, torch.bfloat16),
        (90, 64, 4096, torch.bfloat16),
        long(90, 128, 4096, torch.bfloat16),
        long(80, 72, 4096, torch.bfloat16),
        long(89, 80, 4096, torch.float32),
    ],
)
def test_full_attention(capability: int, dim: int, longest: int, dtype: torch.dtype) -> None:
    with compiling_for(capability) as kernels:
        full_attention.full_attention(meta(4096, 48 * dim, dtype=dtype), meta(1, dtype=torch.int32), longest, 16, 0.1)
    (kernel,) = kernels
    check(kernel, capability)
    assert kernel.name.startswith("hopper") == (capability == 90 and longest > 64 and dim < 128)
    if capability == 90:
        assert "wgmma.mma_async" in kernel.asm["ptx"]


def test_patches_whose_rows_are_no_multiples_of_16_bytes() -> None:
    """Of 14 by 14 pixels once: what loads by tiles cannot have them."""
    with compiling_for(90) as kernels:
        matmul(meta(4096, 588), meta(1024, 588))
    (kernel,) = kernels
    check(kernel, 90)
    assert "wgmma.mma_async" in kernel.asm["ptx"]


@pytest.mark.parametrize("capability", [90, long(80)])
def test_pointwise(capability: int) -> None:
    x, w, qkv = meta(64, 1152), meta(1152), meta(64, 3 * 1152)
    places, turns = meta(64, 2, dtype=torch.int32), meta(64, 72, dtype=torch.float32)
    ids, axis, normal = meta(64, dtype=torch.int32), meta(36, dtype=torch.int32), meta(2, 3, dtype=torch.float32)
    pixels = meta(128, 128, 3, dtype=torch.uint8)
    with compiling_for(capability) as kernels:
        image_patches.image_patches(pixels, places, normal, 16, 2, torch.bfloat16)
        image_patches.image_patches(pixels[:112, :112].contiguous(), places, normal, 14, 1, torch.bfloat16)
        grid_positions.add_grid_positions(x, meta(2304, 1152), places, 8, 8)
        cubic_positions.add_cubic_positions(x, meta(576, 1152), places, 8, 8)
        layer_norm.layer_norm(x, w, w, 1e-6)
        layer_norm.add_layer_norm(x, x, w, w, 1e-6)
        for kind in gelu.KINDS:
            gelu.gelu(x, kind)
        mean_rows.mean_rows(x, 16)
        mean_rows.mean_rows(x, 16, 1152**0.5, (w.float(), w.float()))
        clamp_into.clamp_into(x, meta(2, dtype=torch.float32), qkv, 1152)
        head_norms.norm_heads(qkv, meta(3, 72, dtype=torch.float32), 16, 1e-6)
        tile_rows.tile_rows(x, w, meta(65, 1152), places)
        axis_turns.axis_turns(turns, places, axis, turns)
        turn_rows.turn_rows(qkv, turns, 16)
        for add in (False, True):
            image_rows.place_image_rows(x, ids, x, add=add)
    assert len(kernels) == 18
    for kernel in kernels:
        check(kernel, capability)


def test_sizes_do_not_recompile() -> None:
    """Of images there are as many as one likes: one kernel of a kind serves them all."""
    for launch in (
        lambda rows: image_patches.image_patches(
            meta(16 * rows, 48, 3, dtype=torch.uint8), meta(3 * rows, 2, dtype=torch.int32),
            meta(2, 3, dtype=torch.float32), 16, 2, torch.bfloat16,
        ),
        lambda rows: grid_positions.add_grid_positions(
            meta(3 * rows, 64), meta(25, 64), meta(3 * rows, 2, dtype=torch.int32), rows, 3
        ),
        lambda rows: cubic_positions.add_cubic_positions(
            meta(3 * rows, 64), meta(25, 64), meta(3 * rows, 2, dtype=torch.int32), 3, rows
        ),
        lambda rows: gelu.gelu(meta(rows, 64), "exact"),
        lambda rows: full_attention.full_attention(
            meta(rows * 400, 48 * 72), meta(1, dtype=torch.int32), rows * 400, 16, 0.1
        ),
    ):  # fmt: skip
        with compiling_for(90) as kernels:
            for rows in (1, 2, 7, 16, 48):
                launch(rows)
        assert len({kernel.hash for kernel in kernels}) == 1
