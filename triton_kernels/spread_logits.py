"""Logits of some tokens as logits of all, of which the others have none: minus infinity.

Shape suffixes: R rows, V tokens, U those that have some.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_device, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv

_BLOCK = 1024


@triton.jit(do_not_specialize=["U", "V", "stride"], do_not_specialize_on_alignment=["U", "V", "stride"])
def _spread_logits_kernel(logits_ptr, places_ptr, out_ptr, U, V, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (R, V / BLOCK): one program owns BLOCK tokens of a row."""
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places_ptr + token, mask=token < V, other=-1)
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    known = (place >= 0) & (place < U)
    logits = tl.load(logits_ptr + row * stride + place, mask=known, other=float("-inf"))
    tl.store(out_ptr + row * V + token, logits, mask=token < V)


def spread_logits(logits_RU: Tensor, places_V: Tensor) -> Tensor:
    """[R, U] -> [R, V]. `places_V`: where each token's logit is; -1: nowhere. Mutates nothing; graph-safe."""
    check_dtype("logits", logits_RU, *FLOATS)
    check_shape("logits", logits_RU, None, None)
    check_shape("places", places_V, None)
    check_dtype("places", places_V, torch.int32)
    check_contiguous("places", places_V)
    check_device("places", places_V, logits_RU)
    R, U = logits_RU.shape
    if R and logits_RU.stride(1) != 1:
        raise ValueError(f"logits: got strides {list(logits_RU.stride())}, wanted rows without gaps")
    if not use_kernels(logits_RU):
        return spread_logits_reference(logits_RU, places_V)
    V = len(places_V)
    out_RV = torch.empty(R, V, dtype=logits_RU.dtype, device=logits_RU.device)
    if R and V:
        _spread_logits_kernel[(R, cdiv(V, _BLOCK))](
            logits_RU, places_V, out_RV, U, V, logits_RU.stride(0), BLOCK=_BLOCK, num_warps=4,
            **overlap_options(logits_RU),
        )  # fmt: skip
    return out_RV


def spread_logits_reference(logits_RU: Tensor, places_V: Tensor) -> Tensor:
    """The same in PyTorch."""
    known_V = (places_V >= 0) & (places_V < logits_RU.shape[1])
    out_RV = logits_RU[:, places_V.clamp(0, logits_RU.shape[1] - 1).long()]
    return out_RV.masked_fill(~known_V, float("-inf"))
