"""Products with a matrix of each head's own, between heads and latents: the Triton kernels, or on the CPU oneDNN.

As in `linear.py`, whose reordered weights these are: so on the CPU, too, a token's bits do not depend on its company.

Shape suffixes as in `latent_heads.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tercet.model.linear import is_reordered, linear, reorder_for_cpu
from tercet.triton_kernels.latent_heads import latent_queries, latent_values
from tercet.triton_kernels.latent_prologue import turned_reference


@dataclass(frozen=True)
class ReorderedHeads:
    """Each head's two matrices, for the CPU: from its query to latents, and from latents to its value."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


def reorder_heads(up_HXL: Tensor, num_still: int) -> Tensor | ReorderedHeads:
    """The matrices as these functions like them best on their device."""
    keys = tuple(reorder_for_cpu(up_XL[:num_still].t().contiguous()) for up_XL in up_HXL)
    if not is_reordered(keys[0]):
        return up_HXL
    return ReorderedHeads(keys, tuple(reorder_for_cpu(up_XL[num_still:].contiguous()) for up_XL in up_HXL))


def queries_to_latents(
    q_TQ: Tensor, up: Tensor | ReorderedHeads, num_still: int, positions_T: Tensor, cos_sin_PR: Tensor, *,
    in_pairs: bool, rows: Tensor | None, few: Tensor | None,
) -> Tensor:  # fmt: skip
    """See `latent_queries`."""
    if isinstance(up, Tensor):
        return latent_queries(q_TQ, up, num_still, positions_T, cos_sin_PR, in_pairs=in_pairs, rows=rows, few=few)
    still_THS, turned_THR = q_TQ.unflatten(1, (len(up.keys), -1)).tensor_split([num_still], 2)
    queries_THL = _products(still_THS, up.keys)
    turned_THR = turned_reference(turned_THR, positions_T, cos_sin_PR, in_pairs=in_pairs)
    return torch.cat((queries_THL, turned_THR), 2)


def values_of_latents(attended_THL: Tensor, up: Tensor | ReorderedHeads, num_still: int, rows: Tensor | None) -> Tensor:
    """See `latent_values`."""
    if isinstance(up, Tensor):
        return latent_values(attended_THL, up, num_still, rows)
    return _products(attended_THL, up.values)


def _products(x_THK: Tensor, matrices_NK: tuple[Tensor, ...]) -> Tensor:
    pairs = zip(x_THK.unbind(1), matrices_NK, strict=True)
    return torch.stack([linear(x_TK.contiguous(), matrix, None, deterministic=False) for x_TK, matrix in pairs], 1)
