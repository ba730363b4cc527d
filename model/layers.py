"""One decoder layer on one rank: attention and MLP between norms, each ending in a sum over ranks.

Knows the kernels and the shapes of a step's tokens; knows no request, and no checkpoint.

Shape suffixes: T tokens of the step (decode rows, then prefill tokens), D hidden size, H q heads of this rank times
head size, N q, k and v rows of this rank, F intermediate size of this rank, S slots, M pages of a slot, P positions,
R rotary dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tercet.model.config import ModelConfig
from tercet.model.linear import linear, linear_add
from tercet.model.parallel import Group
from tercet.model.weights import LayerWeights
from tercet.triton_kernels.add_rms_norm import add_rms_norm, rms_norm
from tercet.triton_kernels.attention import decode_attention, prefill_attention
from tercet.triton_kernels.attention_prologue import attention_prologue
from tercet.triton_kernels.matmul import matmul_silu_and_mul
from tercet.triton_kernels.prepare import StepInputs
from tercet.triton_kernels.silu_and_mul import silu_and_mul


@dataclass(frozen=True)
class Layer:
    """What every layer of a rank shares, and this layer's weights."""

    config: ModelConfig
    weights: LayerWeights
    group: Group
    cos_sin_PR: Tensor
    window: int
    interleaved: bool

    def forward(
        self, residual_TD: Tensor, update_TD: Tensor | None, inputs: StepInputs, page_table_SM: Tensor, kv: Tensor
    ) -> Tensor | None:
        """Run the layer on `residual_TD` in place. `kv`: this layer's cache, [k/v, page, kv head, token, dim].

        With several ranks the sum of a block over ranks is not yet in the residual when the next norm reads it: it is
        the `update_TD` that the fused add and norm takes, and that this returns for the next layer.
        """
        weights = self.weights
        x_TD = self._norm(residual_TD, update_TD, weights.input_norm_D)
        attended_TH = self._attention(x_TD, inputs, page_table_SM, kv)
        update_TD = self._add(attended_TH, weights.o_DQ, weights.o_bias_D, residual_TD)
        x_TD = self._norm(residual_TD, update_TD, weights.post_norm_D)
        return self._add(self._gate(x_TD), weights.down_DF, weights.down_bias_D, residual_TD)

    def _norm(self, residual_TD: Tensor, update_TD: Tensor | None, weight_D: Tensor) -> Tensor:
        if update_TD is None:
            return rms_norm(residual_TD, weight_D, self.config.rms_norm_eps)
        return add_rms_norm(update_TD, residual_TD, weight_D, self.config.rms_norm_eps)

    def _attention(self, x_TD: Tensor, inputs: StepInputs, page_table_SM: Tensor, kv: Tensor) -> Tensor:
        config, weights = self.config, self.weights
        num_heads = config.num_heads // self.group.size
        k_cache, v_cache = kv[0], kv[1]
        qkv_TN = linear(x_TD, weights.qkv_ND, weights.qkv_bias_N)
        q_THD = attention_prologue(
            qkv_TN,
            inputs.positions_T,
            inputs.kv_slots_T,
            self.cos_sin_PR,
            weights.q_norm_H,
            weights.k_norm_H,
            config.rms_norm_eps,
            k_cache,
            v_cache,
            num_heads,
        )
        num_decodes = inputs.decode_slots_B.shape[0]
        out_THD = torch.empty_like(q_THD)
        scale = config.head_dim**-0.5
        if num_decodes:
            decode_attention(
                q_THD[:num_decodes],
                k_cache,
                v_cache,
                page_table_SM,
                inputs.decode_slots_B,
                inputs.decode_lengths_B,
                scale,
                window=self.window,
                out=out_THD[:num_decodes],
            )
        if num_decodes < q_THD.shape[0]:
            prefill_attention(
                q_THD[num_decodes:],
                k_cache,
                v_cache,
                page_table_SM,
                inputs.chunk_slots_C,
                inputs.chunk_starts_C,
                inputs.query_starts_C1,
                scale,
                window=self.window,
                out=out_THD[num_decodes:],
            )
        return out_THD.flatten(1)

    def _gate(self, x_TD: Tensor) -> Tensor:
        weights = self.weights
        if self.interleaved:
            return matmul_silu_and_mul(x_TD, weights.gate_up_2FD)
        return silu_and_mul(linear(x_TD, weights.gate_up_2FD, weights.gate_up_bias_2F))

    def _add(self, x_TN: Tensor, weight_DN: Tensor, bias_D: Tensor | None, residual_TD: Tensor) -> Tensor | None:
        """Add the projection of `x_TN` to the residual: at once, or as the update to return."""
        if self.group.size == 1 and bias_D is None:
            linear_add(x_TN, weight_DN, residual_TD)
            return None
        # A bias counts once, not once a rank.
        update_TD = linear(x_TN, weight_DN, bias_D if self.group.rank == 0 else None)
        return self.group.all_reduce(update_TD)
