"""A rank's weights as a CPU reads them fastest.

Knows which matrices there are; what order that is, the products say.
"""

from dataclasses import replace

from torch import Tensor

from tercet.model.expert_products import ReorderedExperts, reorder_experts
from tercet.model.head_products import reorder_heads
from tercet.model.linear import reorder_for_cpu
from tercet.model.rank_weights import (
    DeltaWeights,
    EagleWeights,
    ExpertWeights,
    GuesserWeights,
    LatentWeights,
    LayerWeights,
    MlpWeights,
    Weights,
)
from tercet.triton_kernels.scaled_weight import Weight


def reordered_for_cpu(weights: Weights) -> Weights:
    """The same weights, the matrices of products in the order the CPU reads fastest; on a GPU as they are.

    What was given is used up: each matrix gives its memory back before the next one's copy is made.
    """
    layers = tuple(_reordered_layer(layer, weights.interleaved) for layer in weights.layers)
    tied, guesser = weights.lm_head_VD is weights.embedding_VD, weights.guesser
    lm_head_VD = reorder_for_cpu(weights.lm_head_VD) if tied else _replaced(weights.lm_head_VD)
    if guesser is not None:
        guesser = _reordered_guesser(guesser, weights.interleaved)
    inputs = weights.inputs and replace(weights.inputs, made_XD=_reordered(weights.inputs.made_XD))
    return replace(weights, layers=layers, lm_head_VD=lm_head_VD, guesser=guesser, inputs=inputs)


def _reordered_guesser(guesser: GuesserWeights | EagleWeights, interleaved: bool) -> GuesserWeights | EagleWeights:
    layer = _reordered_layer(guesser.layer, interleaved)
    if isinstance(guesser, GuesserWeights):
        return replace(guesser, join_DE=_reordered(guesser.join_DE), layer=layer)
    return replace(guesser, layer=layer, lm_head_UD=_replaced(guesser.lm_head_UD))


def _reordered_layer(layer: LayerWeights, interleaved: bool) -> LayerWeights:
    inputs = layer.inputs
    if inputs is not None:
        inputs = replace(inputs, gate_PD=_reordered(inputs.gate_PD), out_DP=_reordered(inputs.out_DP))
    return replace(
        layer,
        inputs=inputs,
        qkv_ND=_reordered(layer.qkv_ND),
        latent=layer.latent and _reordered_latent(layer.latent),
        delta=layer.delta and _reordered_delta(layer.delta),
        o_DQ=_reordered(layer.o_DQ),
        mlp=layer.mlp and _reordered_mlp(layer.mlp, interleaved),
        beside=layer.beside and replace(layer.beside, experts=_reordered_experts(layer.beside.experts)),
    )


def _reordered_mlp(mlp: MlpWeights | ExpertWeights, interleaved: bool) -> MlpWeights | ExpertWeights:
    if isinstance(mlp, ExpertWeights):
        return _reordered_experts(mlp)
    gate_up_2FD = mlp.gate_up_2FD if interleaved else _reordered(mlp.gate_up_2FD)
    return replace(mlp, gate_up_2FD=gate_up_2FD, down_DF=_reordered(mlp.down_DF))


def _reordered_experts(experts: ExpertWeights) -> ExpertWeights:
    in_16_bits = experts.router_LD.dtype.itemsize == 2  # then its logits may be wanted in fp32
    return replace(
        experts,
        router_LD=experts.router_LD if in_16_bits else _replaced(experts.router_LD),
        gate_up_E2FD=_reordered_matrices(experts.gate_up_E2FD),
        down_EDF=_reordered_matrices(experts.down_EDF),
    )


def _reordered_matrices(w_ENK: Weight | ReorderedExperts) -> Weight | ReorderedExperts:
    if not isinstance(w_ENK, Tensor):
        return w_ENK
    experts = reorder_experts(w_ENK)
    if experts is not w_ENK:
        w_ENK.untyped_storage().resize_(0)  # others still hold the tensor
    return experts


def _reordered_latent(latent: LatentWeights) -> LatentWeights:
    query_XQ, up_HXL = latent.query_XQ, latent.up_HXL
    assert isinstance(up_HXL, Tensor)
    heads = reorder_heads(up_HXL, latent.num_still)
    if heads is not up_HXL:
        up_HXL.untyped_storage().resize_(0)  # others still hold the tensor
    return replace(latent, query_XQ=None if query_XQ is None else _reordered(query_XQ), up_HXL=heads)


def _reordered_delta(delta: DeltaWeights) -> DeltaWeights:
    return replace(delta, rates_RD=None if delta.rates_RD is None else _reordered(delta.rates_RD))


def _reordered(weight: Weight) -> Weight:
    return _replaced(weight) if isinstance(weight, Tensor) else weight  # which kernels read


def _replaced(weight: Tensor) -> Tensor:
    reordered = reorder_for_cpu(weight)
    if reordered is not weight:
        weight.untyped_storage().resize_(0)  # others still hold the tensor
    return reordered
