"""What each layer is told of a token beside the stream: of its id, by a table of its own, and of its embedding.

Made once for a step, for all layers; a layer lets some of it through, by the stream, and adds what it makes of that.

Shape suffixes: T tokens of the step, R rows, of all tokens or of some, D hidden size, V vocabulary of this rank, P
numbers that a layer is told of a token, X those of all layers, side by side.
"""

from typing import NamedTuple

from torch import Tensor

from tercet.model.linear import linear
from tercet.model.parallel import Group
from tercet.model.rank_weights import InputWeights, LayerInputWeights
from tercet.triton_kernels.add_normed import add_normed
from tercet.triton_kernels.gelu_by import gelu_by
from tercet.triton_kernels.scaled_embedding import scaled_embedding


def layer_inputs(
    ids_T: Tensor, embedded_TD: Tensor, weights: InputWeights, group: Group, eps: float, image_id: int, *,
    deterministic: bool,
) -> Tensor:  # fmt: skip
    """[T, X]. `embedded_TD`: the tokens' embeddings as layers begin with them; `image_id`: as which token those of
    images count in the table. Launched without overlap at first.

    Both parts count alike: each is divided by the root of two, where it is scaled anyway. What is made of the embedding
    would be divided by the root of its size ahead of its norm, which a larger epsilon does, too.
    """
    size, hidden = len(weights.norm_P), embedded_TD.shape[1]
    first = group.rank * len(weights.table_VX)
    inputs_TX = group.all_reduce(scaled_embedding(ids_T, weights.table_VX, first, (size / 2) ** 0.5, image_id))
    made_TX = linear(embedded_TD, weights.made_XD, None, deterministic=deterministic)
    parts = made_TX.view(-1, size), inputs_TX.view(-1, size)
    add_normed(*parts, weights.norm_P, eps * hidden, deterministic=deterministic)
    return inputs_TX


class Told(NamedTuple):
    """What one layer is told."""

    inputs_TX: Tensor
    layer: int
    rows_R: Tensor | None = None
    """Which tokens the stream's are; None: all."""


def let_through(stream_RD: Tensor, told: Told, weights: LayerInputWeights, *, deterministic: bool) -> Tensor:
    """What a layer makes of its part, [R, D]: the same on each rank."""
    gate_RP = linear(stream_RD, weights.gate_PD, None, deterministic=deterministic)
    gate_RP = gelu_by(gate_RP, told.inputs_TX, told.layer * gate_RP.shape[1], told.rows_R)
    return linear(gate_RP, weights.out_DP, None, deterministic=deterministic)
