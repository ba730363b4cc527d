"""One decoder layer on one rank: attention and MLP between norms, each ending in a sum over ranks.

Knows what each layer has in the place of either; knows no request, and no checkpoint.

Shape suffixes: T tokens of the step (decode rows, then prefill tokens), H q heads of this rank times head size, N q, k
and v rows of this rank, J those of q and k, F intermediate size of this rank, S slots, M pages of a slot, P positions,
R rotary dimension.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from tercet.model.adapters import LayerAdapters
from tercet.model.attention import Attention
from tercet.model.attention_plan import AttentionPlan
from tercet.model.blocks import Delta, Mamba
from tercet.model.cache_tables import CacheTables
from tercet.model.config import ModelConfig
from tercet.model.delta_rule import follow_delta_rule
from tercet.model.experts import go_through_experts
from tercet.model.latents import attend_to_latents
from tercet.model.layer_inputs import Told, let_through
from tercet.model.linear import Adapted, Matrix, Pairs, linear
from tercet.model.mamba_rule import follow_mamba
from tercet.model.parallel import Group
from tercet.model.rank_weights import BesideWeights, ExpertWeights, LayerWeights, Weights
from tercet.model.residual import Residual
from tercet.model.rope import Rope
from tercet.model.states import LayerState
from tercet.triton_kernels.add_normed import add_normed
from tercet.triton_kernels.add_rms_norm import rms_norm
from tercet.triton_kernels.attention_reference import Scoring
from tercet.triton_kernels.gelu_and_mul import gelu_and_mul
from tercet.triton_kernels.prepare import StepInputs
from tercet.triton_kernels.relu_squared import relu_squared
from tercet.triton_kernels.row_groups import RowGroups
from tercet.triton_kernels.scaled_weight import Weight
from tercet.triton_kernels.silu_and_mul import silu_and_mul
from tercet.triton_kernels.xielu import xielu

_ACTIVATIONS = {"silu": silu_and_mul, "gelu": gelu_and_mul, "relu2": relu_squared}


@dataclass(frozen=True)
class Layer:
    """One layer's weights, and what all layers of a rank share."""

    config: ModelConfig
    weights: LayerWeights
    group: Group
    attention: Attention
    """To keys and values, of layers that have it."""
    interleaved: bool
    deterministic: bool
    adapters: LayerAdapters | None = None

    def attend(
        self, residual: Residual, inputs: StepInputs, page_table_SM: Tensor, held: Tensor | LayerState,
        plan: AttentionPlan, *, last_queries: bool,
    ) -> Tensor:  # fmt: skip
        """What attention makes of the tokens in `residual`: [T, H]. `held`: this layer's cache, [k/v, page, kv head,
        token, dim], to which their K and V go, or latents; or its states.

        `plan`: how the step's attention is divided; `last_queries`: of chunks only their last tokens count.
        """
        if isinstance(held, LayerState):
            follow = self._follow_mamba if self.weights.delta is None else self._follow_delta_rule
            return follow(residual, inputs, held)
        weights, attention, latent = self.weights, self.attention, self.config.latent
        if weights.latent is not None and latent is not None:
            x_TN = residual.read(weights.input_norm_D, weights.qkv_ND, None)
            return attend_to_latents(
                x_TN, inputs, page_table_SM, held[0], plan, latent=latent, weights=weights.latent,
                cos_sin_PR=attention.cos_sin_PR, scale=attention.scoring.scale,
                query_scales_P=attention.query_scales_P, deterministic=self.deterministic, last_queries=last_queries,
            )  # fmt: skip
        qkv_ND = self._with_adapters(weights.qkv_ND, "qkv", inputs.groups_T)
        return attention.attend(residual, qkv_ND, inputs, page_table_SM, held, plan, last_queries=last_queries)

    def _follow_delta_rule(self, residual: Residual, inputs: StepInputs, state: LayerState) -> Tensor:
        config, weights = self.config, self.weights
        assert isinstance(config.carried, Delta)
        assert weights.delta is not None
        x_TN = residual.read(weights.input_norm_D, self._with_adapters(weights.qkv_ND, "qkv", inputs.groups_T), None)
        apart = weights.delta.rates_RD
        rates_TR = None if apart is None else residual.read(weights.input_norm_D, apart, None)
        delta, eps = config.carried.of_rank(self.group.size), config.rms_norm_eps
        return follow_delta_rule(x_TN, rates_TR, inputs, state, delta=delta, weights=weights.delta, eps=eps)

    def _follow_mamba(self, residual: Residual, inputs: StepInputs, state: LayerState) -> Tensor:
        config, weights = self.config, self.weights
        assert isinstance(config.carried, Mamba)
        assert weights.mamba is not None
        x_TN = residual.read(weights.input_norm_D, weights.qkv_ND, None)
        mamba, eps = config.carried.of_rank(self.group.size), config.rms_norm_eps
        return follow_mamba(x_TN, inputs, state, mamba=mamba, weights=weights.mamba, eps=eps, group=self.group)

    def add(
        self, residual: Residual, attended_TH: Tensor, groups_T: RowGroups | None = None, told: Told | None = None
    ) -> None:
        """Add the layer's two blocks to `residual`: what attention made of its tokens, projected, and the MLP; and what
        it makes of what it is told beside."""
        self._add_blocks(residual, attended_TH, groups_T)
        if (inputs := self.weights.inputs) is not None:
            assert told is not None
            update_TD = let_through(residual.whole(), told, inputs, deterministic=self.deterministic)
            residual.add_whole(update_TD, inputs.norm_D, self.weights.scale_1)

    def _add_blocks(self, residual: Residual, attended_TH: Tensor, groups_T: RowGroups | None) -> None:
        weights = self.weights
        o_DQ = self._with_adapters(weights.o_DQ, "o", groups_T)
        _add(residual, attended_TH, o_DQ, weights.o_bias_D, weights.o_norm_D)
        mlp = weights.mlp
        if mlp is None:
            return
        if isinstance(mlp, ExpertWeights):
            assert self.config.experts is not None
            assert weights.post_norm_D is not None
            through = partial(
                go_through_experts, weights=mlp, experts=self.config.experts, deterministic=self.deterministic,
                counts_biases=self.group.rank == 0,
            )  # fmt: skip
            residual.add_block(weights.post_norm_D, through)
            return
        gate_up_2FD = self._with_adapters(mlp.gate_up_2FD, "gate_up", groups_T)
        if self.interleaved:
            norm_D = weights.post_norm_D
            gated_TF = residual.gate(gate_up_2FD) if norm_D is None else residual.norm_gate(norm_D, gate_up_2FD)
        else:
            gate_up_T2F = residual.read(weights.post_norm_D, gate_up_2FD, mlp.gate_up_bias_2F)
            if mlp.curve_4 is not None:
                gated_TF = xielu(gate_up_T2F, mlp.curve_4)
            else:
                gated_TF = _ACTIVATIONS[self.config.activation](gate_up_T2F)
        down_DF = self._with_adapters(mlp.down_DF, "down", groups_T)
        if weights.beside is not None:
            self._add_both(residual, gated_TF, down_DF, weights.beside)
            return
        _add(residual, gated_TF, down_DF, mlp.down_bias_D, weights.down_norm_D, self._scale_of_blocks)

    def _add_both(self, residual: Residual, gated_TF: Tensor, down_DF: Matrix, beside: BesideWeights) -> None:
        """What the MLP makes and what experts beside it make of the same stream, each normed, and their sum as well."""
        (chosen_by,) = residual.normed(beside.router_norm_D)
        (read,) = residual.normed(beside.input_norm_D)
        rows, deterministic, eps = read.count_1, self.deterministic, self.config.rms_norm_eps
        assert self.config.experts is not None
        assert self.weights.down_norm_D is not None
        many_TD = go_through_experts(
            read.x_TD, rows, weights=beside.experts, experts=self.config.experts, deterministic=deterministic,
            counts_biases=False, router_TD=chosen_by.x_TD,
        )  # fmt: skip
        one_TD = linear(gated_TF, down_DF, None, deterministic=deterministic, rows=rows)
        one_TD, many_TD = (self.group.all_reduce(part, deterministic=deterministic) for part in (one_TD, many_TD))
        both_TD = rms_norm(one_TD, beside.mlp_norm_D, eps, rows, deterministic=deterministic)
        add_normed(many_TD, both_TD, beside.norm_D, eps, rows, deterministic=deterministic)
        residual.add_whole(both_TD, self.weights.down_norm_D, self._scale_of_blocks)

    @property
    def _scale_of_blocks(self) -> Tensor | None:
        """The layer's, where nothing comes behind them."""
        return self.weights.scale_1 if self.weights.inputs is None else None

    def _with_adapters(self, weight: Weight, product: str, groups_T: RowGroups | None) -> Matrix:
        """A product's matrix and what adapters add, in a step of which some token goes through one."""
        pairs: Pairs | None = getattr(self.adapters, product, None)
        return weight if groups_T is None or pairs is None else Adapted(weight, pairs, groups_T)


def make_layers(
    config: ModelConfig, weights: Weights, group: Group, turns: Mapping[tuple[Rope | None, int], Tensor],
    scales: Mapping[Rope | None, Tensor | None], max_seen: int, tables: CacheTables, *, deterministic: bool,
    adapters: Sequence[LayerAdapters],
) -> list[Layer]:  # fmt: skip
    """All of a rank. `turns`: of each way to turn heads; `scales`: what queries are multiplied by; `max_seen`: longer
    windows are none; `tables`: by which they find their keys and values; `adapters`: of each layer, if any."""
    layers, of_attending = [], iter(tables.of_layers)
    for index, (layer, window, heads, turn) in enumerate(
        zip(weights.layers, config.layer_windows, config.layer_heads, config.turns, strict=True)
    ):
        seen = window if window < max_seen else 0
        scoring = Scoring(config.attention_scale, seen, config.attention_softcap, sinks_H=layer.sinks_H)
        table = next(of_attending) if config.carried_of(index) is None else 0
        attention = Attention(config, layer, group, heads, turns[turn], scoring, deterministic, table, scales[turn[0]])
        own = adapters[index] if adapters else None
        layers.append(Layer(config, layer, group, attention, weights.interleaved, deterministic, own))
    return layers


def _add(
    residual: Residual, x_TN: Tensor, weight_DN: Matrix, bias_D: Tensor | None, norm_D: Tensor | None,
    scale_1: Tensor | None = None,
) -> None:  # fmt: skip
    if norm_D is None:
        residual.add(x_TN, weight_DN, bias_D)
    else:
        residual.add_normed(x_TN, weight_DN, bias_D, norm_D, scale_1)
