"""An image's pixels as the patches that a vision encoder multiplies: shifted and scaled, each patch a row.

Knows in which order a patch has its numbers: channel, frame (a still picture is in all of them), row, column. Which
patch a row is of, it is told.

Shape suffixes: H x W pixels, P patches, K numbers of one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import (
    FLOATS,
    check_contiguous,
    check_device,
    check_dtype,
    check_indices,
    check_shape,
)
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import next_power_of_2


@triton.jit(do_not_specialize=["W"], do_not_specialize_on_alignment=["W"])
def _image_patches_kernel(
    pixels_ptr, places_ptr, normal_ptr, out_ptr, W,
    SIDE: tl.constexpr, FRAMES: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (P,): one program makes one patch."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    patch = tl.program_id(0).to(tl.int64)
    top = tl.load(places_ptr + patch * 2).to(tl.int64) * SIDE
    left = tl.load(places_ptr + patch * 2 + 1) * SIDE
    index = tl.arange(0, BLOCK_K)
    mask = index < K
    channel = index // (FRAMES * SIDE * SIDE)
    row = index // SIDE % SIDE
    column = index % SIDE
    pixel = tl.load(pixels_ptr + ((top + row) * W + left + column) * 3 + channel, mask=mask, other=0)
    factor = tl.load(normal_ptr + channel, mask=mask, other=0.0)
    shift = tl.load(normal_ptr + 3 + channel, mask=mask, other=0.0)
    y = tl.fma(pixel.to(tl.float32), factor, shift)
    tl.store(out_ptr + patch * K + index, y.to(out_ptr.dtype.element_ty), mask=mask)


def image_patches(
    pixels_HW3: Tensor, places_P2: Tensor, normal_23: Tensor, side: int, frames: int, dtype: torch.dtype
) -> Tensor:
    """uint8 [H, W, 3] -> [P, 3 * frames * side * side]: pixels times `normal_23`'s factors, plus its shifts (fp32).

    `places_P2`: each patch's row and column among the image's patches, int32; nobody looks whether they are inside.
    Mutates nothing; fp32 inside, rounded once; graph-safe.
    """
    check_shape("pixels", pixels_HW3, None, None, 3)
    check_dtype("pixels", pixels_HW3, torch.uint8)
    check_contiguous("pixels", pixels_HW3)
    H, W, _ = pixels_HW3.shape
    if H % side or W % side:
        raise ValueError(f"pixels: got shape {list(pixels_HW3.shape)}, wanted sides that are multiples of {side}")
    check_indices("places", places_P2, pixels_HW3, None, 2)
    check_shape("normal", normal_23, 2, 3)
    check_dtype("normal", normal_23, torch.float32)
    check_contiguous("normal", normal_23)
    check_device("normal", normal_23, pixels_HW3)
    if dtype not in FLOATS:
        raise ValueError(f"dtype: got {dtype}, wanted {' or '.join(map(str, FLOATS))}")
    if not use_kernels(pixels_HW3):
        return image_patches_reference(pixels_HW3, places_P2, normal_23, side, frames, dtype)
    K = 3 * frames * side * side
    out_PK = torch.empty(len(places_P2), K, dtype=dtype, device=pixels_HW3.device)
    if P := len(places_P2):
        _image_patches_kernel[(P,)](
            pixels_HW3, places_P2, normal_23, out_PK, W,
            SIDE=side, FRAMES=frames, K=K, BLOCK_K=next_power_of_2(K), num_warps=4, **overlap_options(pixels_HW3),
        )  # fmt: skip
    return out_PK


def image_patches_reference(
    pixels_HW3: Tensor, places_P2: Tensor, normal_23: Tensor, side: int, frames: int, dtype: torch.dtype
) -> Tensor:
    """The same in PyTorch."""
    normed_3HW = torch.addcmul(normal_23[1], pixels_HW3.float(), normal_23[0]).permute(2, 0, 1)
    squares = normed_3HW.unfold(1, side, side).unfold(2, side, side)  # [3, rows, columns, side, side]
    patches = squares[:, places_P2[:, 0], places_P2[:, 1]].transpose(0, 1)  # [P, 3, side, side]
    return patches[:, :, None].expand(-1, -1, frames, -1, -1).flatten(1).to(dtype)
