"""Attention of one layer on one rank to keys and values: from the stream to what each token has found.

Knows the kernels and which of them serves which of a step's tokens; `Layer` knows the rest of a layer.

Shape suffixes: T tokens of the step (decode rows, then prefill tokens), H q heads of this rank times head size, or in
THD heads of size D, N q, k and v rows of this rank, J those of q and k, S slots, M pages of a slot, P positions, R
rotary dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tercet.model.attention_plan import AttentionPlan, Kind, kind_of
from tercet.model.blocks import Heads
from tercet.model.config import ModelConfig
from tercet.model.linear import Adapted, Matrix, linear
from tercet.model.parallel import Group
from tercet.model.rank_weights import LayerWeights
from tercet.model.residual import Residual
from tercet.triton_kernels.add_rms_norm import rms_norm
from tercet.triton_kernels.attention import decode_attention, prefill_attention
from tercet.triton_kernels.attention_prologue import attention_prologue
from tercet.triton_kernels.attention_reference import Scoring
from tercet.triton_kernels.fused_decode import FusedPlan, fused_decode_attention
from tercet.triton_kernels.latent_attention import LatentPrefill
from tercet.triton_kernels.matmul_prologue import can_fuse_prologue, matmul_prologue
from tercet.triton_kernels.prepare import StepInputs
from tercet.triton_kernels.qk_norm import qk_norm, qk_squares
from tercet.triton_kernels.rotary import rotary
from tercet.triton_kernels.scale_queries import scale_queries
from tercet.triton_kernels.sigmoid_gate import gate_by_sigmoid


@dataclass(frozen=True)
class Attention:
    """A layer's weights, its heads, and how it scores."""

    config: ModelConfig
    weights: LayerWeights
    group: Group
    heads: Heads
    """Of all ranks."""
    cos_sin_PR: Tensor
    scoring: Scoring
    deterministic: bool
    table: int
    """Which of the page tables is its own."""
    query_scales_P: Tensor | None = None
    """What queries are multiplied by at each position, before they turn; None: by one."""

    @property
    def _num_heads(self) -> int:
        return self.config.num_heads // self.group.size

    def attend(
        self, residual: Residual, qkv_ND: Matrix, inputs: StepInputs, page_table_SM: Tensor, kv: Tensor,
        plan: AttentionPlan, *, last_queries: bool,
    ) -> Tensor:  # fmt: skip
        """[T, H]. `qkv_ND`: the weights' matrix, with what adapters add; `kv`: the layer's cache, [k/v, page, kv head,
        token, dim]; `plan`, `last_queries`: see `Layer.attend`."""
        weights, kind = self.weights, self._kind(kv)
        page_table_SM = inputs.page_tables(page_table_SM)[self.table]
        num_tokens, num_decodes = len(inputs.positions_T), len(inputs.decode_slots_B) * inputs.tries
        # Decode rows may be attended to straight from their q, k, v rows; for all others there are queries.
        first = num_decodes if isinstance(plan.decode.get(kind), FusedPlan) else 0
        if self.heads.borrowed:
            qkv_TN = residual.read(weights.input_norm_D, qkv_ND, weights.qkv_bias_N)
            q_THD = self._queries_alone(qkv_TN, inputs)
        elif not isinstance(qkv_ND, Adapted) and self._ends_in_prologue(num_tokens - first, kv):
            qkv_TN, q_THD = self._project_heads(residual, inputs, kv, first)
        else:
            qkv_TN = residual.read(weights.input_norm_D, qkv_ND, weights.qkv_bias_N)
            if weights.qk_norm_J is not None:
                self._norm_qk(qkv_TN, weights.qk_norm_J)
            if self.query_scales_P is not None:
                num_q, rows = self._num_heads * self.heads.dim, inputs.told_tokens_1
                scale_queries(qkv_TN, num_q, inputs.positions_T, self.query_scales_P, rows=rows)
            q_THD = self._prologue(self._without_gates(qkv_TN)[first:], inputs, kv, first)
        out_THD = q_THD.new_empty(num_tokens, *q_THD.shape[1:])
        if num_decodes:
            heads_TN = self._without_gates(qkv_TN)
            self._attend_decodes(heads_TN, q_THD, inputs, page_table_SM, kv, plan, out_THD[:num_decodes])
        if num_decodes < num_tokens:
            prefill = plan.last_queries if last_queries else plan.prefill.get(kind)
            assert not isinstance(prefill, LatentPrefill)
            prefill_attention(
                q_THD[num_decodes - first :],
                kv[0],
                kv[1],
                page_table_SM,
                inputs.chunk_slots_C,
                inputs.chunk_starts_C,
                inputs.query_starts_C1,
                self.scoring.scale,
                work=prefill,
                window=self.scoring.window,
                softcap=self.scoring.softcap,
                sinks_H=self.scoring.sinks_H,
                ends_T=inputs.ends_for(self.scoring.window),
                out=out_THD[num_decodes:],
            )
        out_TH = out_THD.flatten(1)
        if self.config.gated_attention:
            first_gate = qkv_TN.shape[1] - out_TH.shape[1]
            gate_by_sigmoid(out_TH, qkv_TN, first_gate, rows=inputs.told_tokens_1)
        return out_TH

    def _kind(self, kv: Tensor) -> Kind:
        return kind_of(self.table, self.scoring, kv[0], borrowed=self.heads.borrowed)

    def _without_gates(self, qkv_TN: Tensor) -> Tensor:
        """Gates lie behind queries, keys and values."""
        return qkv_TN[:, : -self._num_heads * self.heads.dim] if self.config.gated_attention else qkv_TN

    def _ends_in_prologue(self, num_tokens: int, kv: Tensor) -> bool:
        """Whether the product of so many tokens also does what comes before attention.

        Not in deterministic mode: a fused norm sums in another order than that of decode rows.
        """
        weights, config = self.weights, self.config
        between = weights.qkv_bias_N, weights.qk_norm_J, self.query_scales_P
        if config.qk_norm_behind or config.value_norm or any(one is not None for one in between):
            return False
        return not self.deterministic and can_fuse_prologue(num_tokens, weights.qkv_ND, kv[0], self.cos_sin_PR.shape[1])

    def _turns(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Where each token finds its cosines and sines, and the table that has them."""
        turned = inputs.turned
        return (inputs.positions_T, self.cos_sin_PR) if turned is None else (turned.places_T, turned.cos_sin_TR)

    def _project_heads(self, residual: Residual, inputs: StepInputs, kv: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """q, k, v rows of the `first` tokens; queries of those behind, whose K and V are written."""
        weights, norm_D = self.weights, self.weights.input_norm_D
        dtype, device = weights.qkv_ND.dtype, weights.qkv_ND.device
        heads, kv_slots_T = (self._num_heads, self.heads.dim), inputs.kv_slots_XT[self.table]
        places_T, cos_sin_PR = self._turns(inputs)
        qkv_TN = torch.empty(first, len(weights.qkv_ND), dtype=dtype, device=device)
        q_THD = torch.empty(len(inputs.positions_T) - first, *heads, dtype=dtype, device=device)
        for part in residual.as_it_is() if norm_D is None else residual.normed(norm_D):
            start, end = part.rows.start, part.rows.stop
            begin = min(max(start, first), end)
            ahead = begin - start
            if ahead:
                out = qkv_TN[start:begin]
                linear(part.x_TD[:ahead], weights.qkv_ND, None, out, deterministic=self.deterministic)
            matmul_prologue(
                part.x_TD[ahead:], weights.qkv_ND, places_T[begin:end], kv_slots_T[begin:end], cos_sin_PR,
                *self._head_inputs(kv), q_THD[begin - first : end - first], part.count_1, ahead,
            )  # fmt: skip
        return qkv_TN, q_THD

    def _norm_qk(self, qkv_TN: Tensor, weight_J: Tensor) -> None:
        """Norm all queries of a token together, and all its keys, in place: those of other ranks count, too."""
        num_q = self._num_heads * self.heads.dim
        squares_PT2 = None
        if self.group.size > 1:
            squares_PT2 = self.group.stack(qk_squares(qkv_TN, num_q, len(weight_J) - num_q))
        qk_norm(qkv_TN, weight_J, num_q, self.config.rms_norm_eps, squares_PT2)

    def _head_inputs(self, kv: Tensor) -> tuple[Tensor | None, Tensor | None, float, Tensor, Tensor]:
        """What heads are normed by, and where K and V go: arguments of every kernel that does so."""
        weights = self.weights
        return weights.q_norm_H, weights.k_norm_H, self.config.rms_norm_eps, kv[0], kv[1]

    def _prologue(self, qkv_TN: Tensor, inputs: StepInputs, kv: Tensor, first: int) -> Tensor:
        """Queries of the tokens from `first` on, whose K and V are written."""
        places_T, cos_sin_PR = self._turns(inputs)
        return attention_prologue(
            qkv_TN,
            places_T[first:],
            inputs.kv_slots_XT[self.table, first:],
            cos_sin_PR,
            *self._head_inputs(kv),
            self._num_heads,
            inputs.num_tokens_1,
            first,
            behind=self.config.qk_norm_behind,
            norm_values=self.config.value_norm,
        )

    def _queries_alone(self, q_TH: Tensor, inputs: StepInputs) -> Tensor:
        """Where keys and values are another layer's, and in the cache."""
        assert self.weights.q_norm_H is not None
        eps, deterministic = self.config.rms_norm_eps, self.deterministic
        q_THD = q_TH.view(len(q_TH), self._num_heads, self.heads.dim)
        q_THD = rms_norm(q_THD, self.weights.q_norm_H, eps, deterministic=deterministic)
        rotary(q_THD, q_THD[:, :0], *self._turns(inputs))
        return q_THD

    def _attend_decodes(
        self, qkv_TN: Tensor, q_THD: Tensor, inputs: StepInputs, page_table_SM: Tensor, kv: Tensor,
        plan: AttentionPlan, out_BHD: Tensor,
    ) -> None:  # fmt: skip
        """Attention of the decode rows, which come first: from q, k, v rows where the plan is for that."""
        num_rows, num_heads, _ = out_BHD.shape
        shares = plan.decode.get(self._kind(kv))
        if isinstance(shares, FusedPlan):
            fused_decode_attention(
                qkv_TN[:num_rows],
                self.cos_sin_PR,
                *self._head_inputs(kv),
                page_table_SM,
                shares,
                num_heads,
                self.scoring.scale,
                out_BHD,
                self.scoring.sinks_H,
                inputs.shifts_S,
                norm_values=self.config.value_norm,
            )
        else:
            decode_attention(
                q_THD[:num_rows],
                kv[0],
                kv[1],
                page_table_SM,
                inputs.decode_slots_B,
                inputs.decode_lengths_B,
                self.scoring.scale,
                work=shares,
                window=self.scoring.window,
                softcap=self.scoring.softcap,
                sinks_H=self.scoring.sinks_H,
                tries=inputs.tries,
                lengths_T=inputs.lengths_T,
                out=out_BHD,
            )
