"""One rank's weights: which there are of each layer, and of all.

Knows shapes; where the numbers come from is known by `shard.py`.

Shape suffixes: V vocabulary rows of this rank, D hidden size, N q, k and v rows of this rank together, Q q rows of this
rank, H head size, J q and k rows of this rank, E experts, L rows of what chooses among them or labels, F intermediate
size of this rank, U tokens that a head of its own knows, P numbers that a layer is told of a token beside the stream, X
those of all; of latents Q numbers that queries are made from, X rows of this rank's queries, or of a head, H heads of
this rank, L numbers of a latent; of states C channels of this rank that are convolved, W taps, H value heads of this
rank, V their size, R two rates of each, X numbers of all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tercet.model.config import ModelConfig
from tercet.model.expert_products import ReorderedExperts
from tercet.model.head_products import ReorderedHeads
from tercet.triton_kernels.scaled_weight import ScaledWeight, Weight


@dataclass(frozen=True)
class MlpWeights:
    """One MLP. `gate_up_2FD`: gate rows then up rows, or in turns where `Weights.interleaved` says so; up rows alone
    where there are no gates."""

    gate_up_2FD: Weight
    gate_up_bias_2F: Tensor | None
    down_DF: Weight
    down_bias_D: Tensor | None
    curve_4: Tensor | None = None
    """Of what is made of up rows where there are no gates, if it is the layer's own; in fp32."""


@dataclass(frozen=True)
class ExpertWeights:
    """Many MLPs and what chooses among them; gate and up rows in turns. Kept as stored, all experts' rows follow each
    other. Those that are shared come last, and have no row of the router; or one, that weighs them. Where the choice
    wants more than 16 bits, the router has what they leave behind its rows."""

    router_LD: Tensor
    router_bias_L: Tensor | None
    bias_E: Tensor | None
    """What is added for the choice alone, of those to choose from, in fp32."""
    scales_E: Tensor | None
    """What multiplies how much each of these counts, in fp32."""
    gate_up_E2FD: Weight | ReorderedExperts
    gate_up_bias_E2F: Tensor | None
    down_EDF: Weight | ReorderedExperts
    down_bias_ED: Tensor | None


@dataclass(frozen=True)
class BesideWeights:
    """Experts beside one MLP, and norms: of the stream for what chooses, in fp32, and for the experts; of what both
    make."""

    experts: ExpertWeights
    router_norm_D: Tensor
    input_norm_D: Tensor
    norm_D: Tensor
    mlp_norm_D: Tensor


@dataclass(frozen=True)
class LayerInputWeights:
    """Of a layer: what lets some of what it is told through, by the stream, what adds that, and its norm. Each rank has
    all."""

    gate_PD: Weight
    out_DP: Weight
    norm_D: Tensor


@dataclass(frozen=True)
class InputWeights:
    """What makes what layers are told: a table of this rank's tokens, a product of embeddings, and the norm of what one
    layer is told of these, in fp32, divided by the root of two."""

    table_VX: Tensor
    made_XD: Weight
    norm_P: Tensor


@dataclass(frozen=True)
class LatentWeights:
    """Between a layer's first product, which makes latents, and its attention."""

    query_norm_Q: Tensor | None
    query_XQ: Weight | None
    """What makes this rank's queries of what the first product makes for them; None: that makes them itself."""
    latent_norm_L: Tensor
    up_HXL: Tensor | ReorderedHeads
    """Of each head, the rows that make the part of its key that does not turn of a latent; then those for its value."""
    num_still: int
    """How many the first are."""


@dataclass(frozen=True)
class DeltaWeights:
    """Between a layer's first product and its last, where it carries a state."""

    rates_RD: Weight | None
    """What makes of the stream by how much each head's state is corrected, then by how much it fades; None: the first
    product's last rows do."""
    conv_CW: Tensor
    a_log_H: Tensor
    """How fast states fade, a logarithm; in fp32."""
    dt_bias_H: Tensor
    """What is added to a token's own; in fp32."""
    norm_V: Tensor


@dataclass(frozen=True)
class MambaWeights:
    """The same of a Mamba-2 layer; all but the convolution in fp32."""

    conv_CW: Tensor
    conv_bias_C: Tensor
    a_log_H: Tensor
    """How fast states fade, a logarithm."""
    dt_bias_H: Tensor
    """What is added to a token's own time step."""
    skip_H: Tensor
    """How much of a token's value is added to what it finds: Mamba's D."""
    norm_X: Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One layer. `qkv_ND`: behind the rows for q, k and v come those for gates, if attention has gates. Where the cache
    has latents, it has the rows for queries, of this rank or of what they are made from, then those for latents, then
    those for the numbers that turn; where the layer carries a state, those that `delta_shard.py` or
    `mamba_shard.py` says."""

    input_norm_D: Tensor | None
    qkv_ND: Weight
    qkv_bias_N: Tensor | None
    q_norm_H: Tensor | None
    k_norm_H: Tensor | None
    qk_norm_J: Tensor | None
    sinks_H: Tensor | None
    """One of each head, in fp32."""
    latent: LatentWeights | None
    delta: DeltaWeights | None
    mamba: MambaWeights | None
    o_DQ: Weight
    o_bias_D: Tensor | None
    o_norm_D: Tensor | None
    post_norm_D: Tensor | None
    mlp: MlpWeights | ExpertWeights | None
    beside: BesideWeights | None
    inputs: LayerInputWeights | None
    down_norm_D: Tensor | None
    scale_1: Tensor | None
    """What the stream is multiplied by at the layer's end, in fp32."""


@dataclass(frozen=True)
class GuesserWeights:
    """The layer that guesses, and what is ahead of it and behind: E = 2 D."""

    token_norm_D: Tensor
    hidden_norm_D: Tensor
    join_DE: Weight
    layer: LayerWeights
    norm_D: Tensor
    head_VD: ScaledWeight | None = None
    """The model's head for guesses; None: its own (`guess_head.py`)."""


@dataclass(frozen=True)
class EagleWeights:
    """A layer that guesses from another checkpoint, with a head of its own. It hears the model's stream ahead of some
    layers, and makes of all together what stands for a token."""

    config: ModelConfig
    """Of the layer alone; its vocabulary is the head's."""
    hears: Mapping[int, Tensor]
    """By the model's layers, what is made of the stream ahead of each: [D, D]."""
    token_norm_D: Tensor
    hidden_norm_D: Tensor
    begins_normed: bool
    """The layer adds to what stands for a token as this norm leaves it."""
    layer: LayerWeights
    norm_D: Tensor
    lm_head_UD: Tensor
    """Of few tokens, this rank's."""
    places_V: Tensor | None
    """Which of them each token of the model's is, int32; -1: none. None: they are the model's."""


@dataclass(frozen=True)
class Weights:
    """All of one rank. `lm_head_VD` is the embedding itself where the two are tied."""

    embedding_VD: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_D: Tensor
    lm_head_VD: Tensor
    interleaved: bool
    score_LD: Tensor | None = None
    """What classifies: a head of L labels, or as many tokens' rows of the lm_head. On the host, in fp64."""
    guesser: GuesserWeights | EagleWeights | None = None
    inputs: InputWeights | None = None
