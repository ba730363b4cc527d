"""One decoder layer on one rank: attention and MLP between norms, each ending in a sum over ranks.

Knows the kernels of attention and the shapes of a step's tokens; knows no request, and no checkpoint.

Shape suffixes: T tokens of the step (decode rows, then prefill tokens), H q heads of this rank times head size, N q, k
and v rows of this rank, F intermediate size of this rank, S slots, M pages of a slot, P positions, R rotary dimension.
"""

from dataclasses import dataclass

from torch import Tensor

from tercet.model.attention_plan import AttentionPlan
from tercet.model.config import ModelConfig
from tercet.model.parallel import Group
from tercet.model.residual import Residual
from tercet.model.weights import LayerWeights
from tercet.triton_kernels.attention import decode_attention, prefill_attention
from tercet.triton_kernels.attention_prologue import attention_prologue
from tercet.triton_kernels.fused_decode import FusedPlan, fused_decode_attention
from tercet.triton_kernels.prefill_work import PrefillWork
from tercet.triton_kernels.prepare import StepInputs
from tercet.triton_kernels.silu_and_mul import silu_and_mul


@dataclass(frozen=True)
class Layer:
    """One layer's weights, and what all layers of a rank share."""

    config: ModelConfig
    weights: LayerWeights
    group: Group
    cos_sin_PR: Tensor
    window: int
    interleaved: bool

    def attend(
        self, residual: Residual, inputs: StepInputs, page_table_SM: Tensor, kv: Tensor, plan: AttentionPlan,
        prefill: PrefillWork | None,
    ) -> Tensor:  # fmt: skip
        """What attention makes of the tokens in `residual`: [T, H]. `kv`: this layer's cache, [k/v, page, kv head,
        token, dim], to which their K and V go.

        `plan`: how the step's attention is divided, the same for all layers; `prefill`: the part of it for chunks.
        """
        weights = self.weights
        qkv_TN = residual.norm_linear(weights.input_norm_D, weights.qkv_ND, weights.qkv_bias_N)
        return self._attention(qkv_TN, inputs, page_table_SM, kv, plan, prefill)

    def add(self, residual: Residual, attended_TH: Tensor) -> None:
        """Add the layer's two blocks to `residual`: what attention made of its tokens, projected, and the MLP."""
        weights = self.weights
        residual.add(attended_TH, weights.o_DQ, weights.o_bias_D)
        if self.interleaved:
            gated_TF = residual.norm_gate(weights.post_norm_D, weights.gate_up_2FD)
        else:
            gated_TF = silu_and_mul(
                residual.norm_linear(weights.post_norm_D, weights.gate_up_2FD, weights.gate_up_bias_2F)
            )
        residual.add(gated_TF, weights.down_DF, weights.down_bias_D)

    def _attention(
        self, qkv_TN: Tensor, inputs: StepInputs, page_table_SM: Tensor, kv: Tensor, plan: AttentionPlan,
        prefill: PrefillWork | None,
    ) -> Tensor:  # fmt: skip
        head_dim = self.config.head_dim
        num_heads = self.config.num_heads // self.group.size
        num_tokens, num_decodes = qkv_TN.shape[0], inputs.decode_slots_B.shape[0]
        out_THD = qkv_TN.new_empty(num_tokens, num_heads, head_dim)
        shares = plan.decode.get(self.window)
        first = 0
        if num_decodes and isinstance(shares, FusedPlan):
            first = num_decodes
            fused_decode_attention(
                qkv_TN[:first],
                self.cos_sin_PR,
                self.weights.q_norm_H,
                self.weights.k_norm_H,
                self.config.rms_norm_eps,
                kv[0],
                kv[1],
                page_table_SM,
                shares,
                num_heads,
                head_dim**-0.5,
                out_THD[:first],
            )
        if first < num_tokens:
            self._attend_apart(qkv_TN, inputs, page_table_SM, kv, plan, prefill, first, out_THD)
        return out_THD.flatten(1)

    def _attend_apart(
        self,
        qkv_TN: Tensor,
        inputs: StepInputs,
        page_table_SM: Tensor,
        kv: Tensor,
        plan: AttentionPlan,
        prefill: PrefillWork | None,
        first: int,
        out_THD: Tensor,
    ) -> None:
        """Norms, rotary and the write of K and V for the tokens from `first` on, then attention to what is written."""
        k_cache, v_cache = kv[0], kv[1]
        q_THD = attention_prologue(
            qkv_TN[first:],
            inputs.positions_T[first:],
            inputs.kv_slots_T[first:],
            self.cos_sin_PR,
            self.weights.q_norm_H,
            self.weights.k_norm_H,
            self.config.rms_norm_eps,
            k_cache,
            v_cache,
            out_THD.shape[1],
            inputs.num_tokens_1,
            first,
        )
        num_decodes = inputs.decode_slots_B.shape[0]
        scale = self.config.head_dim**-0.5
        if first < num_decodes:
            work = plan.decode.get(self.window)
            assert not isinstance(work, FusedPlan)
            decode_attention(
                q_THD[:num_decodes],
                k_cache,
                v_cache,
                page_table_SM,
                inputs.decode_slots_B,
                inputs.decode_lengths_B,
                scale,
                work=work,
                window=self.window,
                out=out_THD[:num_decodes],
            )
        if num_decodes < qkv_TN.shape[0]:
            prefill_attention(
                q_THD[num_decodes - first :],
                k_cache,
                v_cache,
                page_table_SM,
                inputs.chunk_slots_C,
                inputs.chunk_starts_C,
                inputs.query_starts_C1,
                scale,
                work=prefill,
                window=self.window,
                out=out_THD[num_decodes:],
            )
