"""One decoder layer on one rank: attention and MLP between norms, each ending in a sum over ranks.

Knows the kernels and the shapes of a step's tokens; knows no request, and no checkpoint.

Shape suffixes: T tokens of the step (decode rows, then prefill tokens), D hidden size, H q heads of this rank times
head size, N q, k and v rows of this rank, F intermediate size of this rank, S slots, M pages of a slot, P positions,
R rotary dimension.
"""

from dataclasses import dataclass

from torch import Tensor

from tercet.model.attention_plan import AttentionPlan
from tercet.model.config import ModelConfig
from tercet.model.linear import linear, linear_add, rms_norm_linear
from tercet.model.parallel import Group
from tercet.model.weights import LayerWeights
from tercet.triton_kernels.add_rms_norm import add_rms_norm
from tercet.triton_kernels.all_reduce import all_reduce_add_rms_norm
from tercet.triton_kernels.attention import decode_attention, prefill_attention
from tercet.triton_kernels.attention_prologue import attention_prologue
from tercet.triton_kernels.decode_shares import DecodeShares
from tercet.triton_kernels.few_rows import FewRows
from tercet.triton_kernels.fused_decode import fused_decode_attention
from tercet.triton_kernels.matmul import matmul_silu_and_mul, rms_norm_matmul_silu_and_mul
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
    deterministic: bool

    def forward(
        self,
        residual_TD: Tensor,
        update_TD: Tensor | None,
        inputs: StepInputs,
        page_table_SM: Tensor,
        kv: Tensor,
        plan: AttentionPlan,
    ) -> Tensor | None:
        """Run the layer on `residual_TD`, in place. `kv`: this layer's cache, [k/v, page, kv head, token, dim].

        With one rank each block adds to the residual in its last product. With several, that product is a part of the
        `update_TD` that the next norm sums over ranks and adds first, which this takes and returns. `plan`: how the
        step's attention is divided, the same for all layers.
        """
        weights = self.weights
        # Only prefill is padded so much that it pays to look how many tokens there are.
        rows = inputs.num_tokens_1 if inputs.chunk_slots_C.shape[0] else None
        qkv_TN = self._norm_linear(
            residual_TD, update_TD, weights.input_norm_D, weights.qkv_ND, weights.qkv_bias_N, rows
        )
        attended_TH = self._attention(qkv_TN, inputs, page_table_SM, kv, plan)
        update_TD = self._add(attended_TH, weights.o_DQ, weights.o_bias_D, residual_TD, rows)
        gated_TF = self._gate(residual_TD, update_TD, rows)
        return self._add(gated_TF, weights.down_DF, weights.down_bias_D, residual_TD, rows)

    def _attention(
        self, qkv_TN: Tensor, inputs: StepInputs, page_table_SM: Tensor, kv: Tensor, plan: AttentionPlan
    ) -> Tensor:
        head_dim = self.config.head_dim
        num_heads = self.config.num_heads // self.group.size
        num_tokens, num_decodes = qkv_TN.shape[0], inputs.decode_slots_B.shape[0]
        out_THD = qkv_TN.new_empty(num_tokens, num_heads, head_dim)
        shares = plan.decode.get(self.window)
        first = 0
        if num_decodes and isinstance(shares, DecodeShares | FewRows):
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
            self._attend_apart(qkv_TN, inputs, page_table_SM, kv, plan, first, out_THD)
        return out_THD.flatten(1)

    def _attend_apart(
        self,
        qkv_TN: Tensor,
        inputs: StepInputs,
        page_table_SM: Tensor,
        kv: Tensor,
        plan: AttentionPlan,
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
            assert not isinstance(work, DecodeShares | FewRows)
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
                work=plan.prefill.get(self.window),
                window=self.window,
                out=out_THD[num_decodes:],
            )

    def _gate(self, residual_TD: Tensor, update_TD: Tensor | None, rows: Tensor | None) -> Tensor:
        weights, eps = self.weights, self.config.rms_norm_eps
        norm_D, weight_2FD = weights.post_norm_D, weights.gate_up_2FD
        if not self.interleaved:
            bias_2F = weights.gate_up_bias_2F
            return silu_and_mul(self._norm_linear(residual_TD, update_TD, norm_D, weight_2FD, bias_2F, rows))
        if update_TD is None:
            return rms_norm_matmul_silu_and_mul(
                residual_TD, norm_D, eps, weight_2FD, deterministic=self.deterministic, rows=rows
            )
        x_TD = self._add_rms_norm(update_TD, residual_TD, norm_D, rows)
        return matmul_silu_and_mul(x_TD, weight_2FD, deterministic=self.deterministic, rows=rows)

    def _norm_linear(
        self,
        residual_TD: Tensor,
        update_TD: Tensor | None,
        norm_D: Tensor,
        weight_ND: Tensor,
        bias_N: Tensor | None,
        rows: Tensor | None,
    ) -> Tensor:
        """Add the update, if there is one, to the residual; norm and project that."""
        eps = self.config.rms_norm_eps
        if update_TD is None:
            return rms_norm_linear(
                residual_TD, norm_D, eps, weight_ND, bias_N, deterministic=self.deterministic, rows=rows
            )
        x_TD = self._add_rms_norm(update_TD, residual_TD, norm_D, rows)
        return linear(x_TD, weight_ND, bias_N, deterministic=self.deterministic, rows=rows)

    def _add(
        self, x_TN: Tensor, weight_DN: Tensor, bias_D: Tensor | None, residual_TD: Tensor, rows: Tensor | None
    ) -> Tensor | None:
        """Add a block's projection to the residual, or return it as the update, which is to be summed over ranks."""
        if self.group.size == 1 and bias_D is None:
            linear_add(x_TN, weight_DN, residual_TD, deterministic=self.deterministic, rows=rows)
            return None
        # A bias counts once, not once a rank.
        bias_D = bias_D if self.group.rank == 0 else None
        return linear(x_TN, weight_DN, bias_D, deterministic=self.deterministic, rows=rows)

    def _add_rms_norm(self, update_TD: Tensor, residual_TD: Tensor, norm_D: Tensor, rows: Tensor | None) -> Tensor:
        """Add the update's sum over ranks into the residual; the total, normed: in one kernel where ranks are peers.

        That kernel's norm sums in another order, and which rows it serves depends on the batch: not deterministic.
        """
        eps = self.config.rms_norm_eps
        if not self.deterministic and (inboxes := self.group.inboxes_for(update_TD)):
            return all_reduce_add_rms_norm(update_TD, residual_TD, norm_D, eps, inboxes)
        self.group.all_reduce(update_TD, deterministic=self.deterministic)
        return add_rms_norm(update_TD, residual_TD, norm_D, eps, rows)
