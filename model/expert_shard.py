"""The places of a layer's experts, and which slice of which checkpoint tensor fills each.

Every rank has a part of each expert's inner size. Knows their tensors' names; reads nothing.

Shape suffixes as in `rank_weights.py`, R rows of all experts together.
"""

import torch
from torch import Tensor

from tercet.model.blocks import Experts
from tercet.model.places import Move, Places
from tercet.model.rank_weights import BesideWeights, ExpertWeights


def expert_weights(places: Places, prefix: str, experts: Experts, hidden: int) -> ExpertWeights:
    """Of the layer whose tensors' names begin with `prefix`."""
    whole, names = experts.intermediate_size, experts.names
    part = whole // places.size
    start = places.rank * part
    # Whose matrices each expert's are part of, their size there, and where they begin.
    block = f"{prefix}{names.block}." if names.block else prefix
    matrices = [(f"{block}experts.{index}.", whole, start) for index in range(experts.count)]
    shared, size = f"{block}{names.shared}.", experts.shared * whole
    matrices += [(shared, size, first + start) for first in range(0, size, whole)]
    rows_of = (names.gate_up,) if names.gate_up else (names.gate, names.up) if experts.gated else (names.up,)
    both_sizes = 2 if experts.gated else 1
    both = {f"{name}{each}.weight" for name, _, _ in matrices for each in rows_of}
    downs = {f"{name}{names.down}.weight" for name, _, _ in matrices}
    gate_up_RD = places.matrix(both, experts.all * both_sizes * part, hidden, hidden)
    down_RF = places.matrix(downs, experts.all * hidden, part, whole)
    for index, (name, size, first) in enumerate(matrices):
        gate_up = gate_up_RD[index * both_sizes * part : (index + 1) * both_sizes * part]
        for turn, each in enumerate(rows_of):
            turns = gate_up[turn :: len(rows_of)]
            sizes = both_sizes * size // len(rows_of), both_sizes * first // len(rows_of)
            places.rows(f"{name}{each}.weight", *sizes, turns)
        down = down_RF[index * hidden : (index + 1) * hidden]
        places.some_columns(f"{name}{names.down}.weight", size, first, down)
    gate_up_E2FD, down_EDF = (
        matrix.view(experts.all, -1, matrix.shape[1]) if isinstance(matrix, Tensor) else matrix
        for matrix in (gate_up_RD, down_RF)
    )
    router_LD, bias_E = _router(places, block, experts, hidden)
    if experts.clamp is None:
        scales_E = places.numbers(f"{prefix}router.per_expert_scale", experts.count) if experts.beside else None
        return ExpertWeights(router_LD, None, bias_E, scales_E, gate_up_E2FD, None, down_EDF, None)
    gate_up_bias_E2F = places.empty(experts.count, 2 * part)
    places.share(f"{block}experts.{names.gate_up}_bias", 2 * whole, gate_up_bias_E2F)
    down_bias_ED = places.empty(experts.count, hidden)
    places.rows(f"{block}experts.{names.down}_bias", experts.count, 0, down_bias_ED)
    router_bias_L = places.whole(f"{block}{names.router}.bias", experts.count)
    return ExpertWeights(
        router_LD, router_bias_L, bias_E, None, gate_up_E2FD, gate_up_bias_E2F, down_EDF, down_bias_ED
    )  # fmt: skip


def weights_beside(places: Places, prefix: str, experts: Experts, hidden: int) -> BesideWeights:
    """Of a layer that has one MLP as well."""
    return BesideWeights(
        experts=expert_weights(places, prefix, experts, hidden),
        router_norm_D=places.numbers(f"{prefix}router.scale", hidden, factor=hidden**-0.5),
        input_norm_D=places.norm(f"{prefix}pre_feedforward_layernorm_2", hidden),
        norm_D=places.norm(f"{prefix}post_feedforward_layernorm_2", hidden),
        mlp_norm_D=places.norm(f"{prefix}post_feedforward_layernorm_1", hidden),
    )


def _router(places: Places, block: str, experts: Experts, hidden: int) -> tuple[Tensor, Tensor | None]:
    """And the bias that it chooses with."""
    name, count = f"{block}{experts.names.router}.weight", experts.count
    paired = experts.biased and places.dtype.itemsize == 2
    router_LD = places.empty(count * (1 + paired) + experts.shared_gated, hidden)
    places.rows(name, count, 0, router_LD[:count])
    if experts.shared_gated:
        places.rows(f"{block}{experts.names.shared}_gate.weight", 1, 0, router_LD[count:])
    if not experts.biased:
        return router_LD, None
    if paired:  # some files have it in fp32
        places.moves.append(Move(name, (count, hidden), 0, 0, count, router_LD[count:], rest=True))
    bias_E = torch.empty(count, dtype=torch.float32, device=places.device)
    as_stored = bias_E[None] if experts.names.bias_is_row else bias_E
    places.rows(f"{block}{experts.names.bias}", len(as_stored), 0, as_stored)
    return router_LD, bias_E
