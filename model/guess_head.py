"""The head that guesses are drawn by: the model's own once more, in eight bits, where those are read much faster.

A guess decides no token: each is compared with what the model draws by its own head. So this one may be rounded, and is
right a little less often. Knows one matrix of a rank; what makes hidden states for it is `guesser.py`'s matter.

Shape suffixes: V vocabulary of this rank, D hidden size, R some of its rows.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tercet.model.kv_cache import FP8_CAPABILITY
from tercet.model.rank_weights import GuesserWeights, Weights
from tercet.model.scaled_rows import rounded
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.dispatch import INTERPRETED, gpu_of
from tercet.triton_kernels.scaled_weight import BYTES, ScaledWeight, stored

LEAST_NUMBERS = 2**26
"""Of a head on a rank that is rounded. In 16 bits so many are 134 MB, which take 28 us at 4.8 TB/s, and half of that is
saved. What is lost is the draw in the product's own kernel: the norm, and scores of logits in memory, are launches of
their own, of two or three us each. Of half as many numbers the two would be about the same."""
_AT_ONCE = 2**24
"""Numbers that are rounded at a time: in fp32 they are 64 MiB, three times, and a head of 2^30 takes 64 rounds."""


def with_guess_head(weights: Weights, least: int = LEAST_NUMBERS) -> Weights:
    """The same with a head in FP8 for guesses, where the model's own layer guesses, and the head has so many numbers,
    of 16 bits, and the GPU knows FP8. On a CPU only the interpreter has one; on the meta device it is as on the GPU
    that is meant."""
    guesser, head_VD = weights.guesser, weights.lm_head_VD
    fits = head_VD.numel() >= least and head_VD.dtype.itemsize == 2 and head_VD.shape[1] % BYTES == 0
    if not isinstance(guesser, GuesserWeights) or not fits:  # others' have a small one of their own
        return weights
    gpu = gpu_of(head_VD.device)
    if not INTERPRETED if gpu is None else gpu.capability < FP8_CAPABILITY:
        return weights
    return replace(weights, guesser=replace(guesser, head_VD=in_fp8(head_VD)))


def in_fp8(w_VD: Tensor) -> ScaledWeight:
    """A scale for each row."""
    numbers_VD = torch.empty(w_VD.shape, dtype=FP8, device=w_VD.device)
    scales_1V = torch.empty(1, len(w_VD), dtype=torch.float32, device=w_VD.device)
    num_rows = max(1, _AT_ONCE // w_VD.shape[1])
    for first in range(0, 0 if w_VD.is_meta else len(w_VD), num_rows):  # which has no numbers, and takes its time
        some = slice(first, first + num_rows)
        rows = rounded(w_VD[some])
        scales_1V[0, some] = rows.scales_RG[:, 0]
        numbers_VD[some] = stored(rows.numbers_RI)
    return ScaledWeight(numbers_VD, scales_1V, w_VD.dtype)
