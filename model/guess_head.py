"""The head that guesses are drawn by: the model's own once more, in eight bits, where those are read much faster.

A guess decides no token: each is compared with what the model draws by its own head. So this one may be rounded, and is
right a little less often. Knows one matrix of a rank; what makes hidden states for it is `guesser.py`'s matter.

Shape suffixes: V vocabulary of this rank, D hidden size, R some of its rows.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tercet.model.kv_cache import FP8_CAPABILITY
from tercet.model.rank_weights import Weights
from tercet.triton_kernels.checks import FP8, FP8_MOST
from tercet.triton_kernels.dispatch import INTERPRETED, gpu_of
from tercet.triton_kernels.scaled_weight import BYTES, ScaledWeight, stored

LEAST_NUMBERS = 2**26
"""Of a head on a rank that is rounded. In 16 bits so many are 134 MB, which an H200 reads in 28 us, and half of that is
saved. What is lost is the draw in the product's own kernel: the norm, logits in memory and the scores of those are two or
three launches more, of two or three us each. Of half as many numbers as these the two would be about the same."""
_AT_ONCE = 2**24
"""Numbers that are rounded at a time: in fp32 they are 64 MiB, twice, and a head of 2^30 takes 64 rounds."""


def with_guess_head(weights: Weights, least: int = LEAST_NUMBERS) -> Weights:
    """The same with a head in FP8 for guesses, where a layer guesses and the head has `least` numbers; on any device, but
    that GPUs have to know FP8, and that on CPUs there is none unless kernels are interpreted. Tensors on the meta device
    get one as on the GPU that they stand for."""
    guesser, head_VD = weights.guesser, weights.lm_head_VD
    if guesser is None or head_VD.numel() < least or head_VD.dtype.itemsize != 2 or head_VD.shape[1] % BYTES:
        return weights
    gpu = gpu_of(head_VD.device)
    if not INTERPRETED if gpu is None else gpu.capability < FP8_CAPABILITY:
        return weights
    return replace(weights, guesser=replace(guesser, head_VD=in_fp8(head_VD)))


def in_fp8(w_VD: Tensor) -> ScaledWeight:
    """Each number rounded to the nearest in FP8, times its row's scale, by which the row's largest is FP8's largest.

    One scale for all columns, which kernels read once: the numbers of FP8 have exponents, so those of smaller groups
    would be no nearer, but for some that are thousands of times smaller than others in their row.
    """
    numbers_VD = torch.empty(w_VD.shape, dtype=FP8, device=w_VD.device)
    scales_1V = torch.empty(1, len(w_VD), dtype=torch.float32, device=w_VD.device)
    num_rows = max(1, _AT_ONCE // w_VD.shape[1])
    for first in range(0, len(w_VD), num_rows):
        some = slice(first, first + num_rows)
        wide_RD = w_VD[some].float()
        # Rows of zeros, as padding has them, are zeros times this.
        scales_R = wide_RD.abs().amax(1).div_(FP8_MOST).clamp_min_(torch.finfo(torch.float32).tiny)
        scales_1V[0, some] = scales_R
        numbers_VD[some] = stored(wide_RD.div_(scales_R[:, None]).to(FP8))
    return ScaledWeight(numbers_VD, scales_1V, w_VD.dtype)
