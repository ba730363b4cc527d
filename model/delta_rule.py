"""What a gated delta layer makes of a step's tokens.

Knows the order of the kernels; `Layer` knows the rest of a layer.

Shape suffixes: T tokens of the step (decode rows, then prefill tokens), N what the first product makes of one, R two
rates of each value head, H value heads of this rank, V numbers of a value.
"""

from torch import Tensor

from tercet.model.blocks import Delta
from tercet.model.rank_weights import DeltaWeights
from tercet.model.states import LayerState
from tercet.triton_kernels.delta_decode import delta_decode
from tercet.triton_kernels.delta_prefill import delta_prefill
from tercet.triton_kernels.delta_prologue import delta_prologue
from tercet.triton_kernels.delta_tried import delta_tried
from tercet.triton_kernels.delta_tried_prologue import delta_tried_prologue
from tercet.triton_kernels.gated_head_norm import gated_head_norm
from tercet.triton_kernels.prepare import StepInputs


def follow_delta_rule(
    x_TN: Tensor, rates_TR: Tensor | None, inputs: StepInputs, state: LayerState, *, delta: Delta,
    weights: DeltaWeights, eps: float,
) -> Tensor:  # fmt: skip
    """[T, N] -> [T, H V]; each token's slot has its state behind it then, unless tokens are tried: then `States.settle`
    is to come. `delta`: this rank's part; `rates_TR`: where they are no part of `x_TN`."""
    out_THV = x_TN.new_empty(len(x_TN), delta.value_heads, delta.value_dim)
    follow = _move_on if inputs.tried is None else _try
    follow(x_TN, rates_TR, inputs, state, delta, weights, out_THV)
    return gated_head_norm(out_THV, x_TN, delta.channels, weights.norm_V, eps, rows=inputs.told_tokens_1)


def _move_on(
    x_TN: Tensor, rates_TR: Tensor | None, inputs: StepInputs, state: LayerState, delta: Delta, weights: DeltaWeights,
    out_THV: Tensor,
) -> None:  # fmt: skip
    decodes = inputs.decode_slots_B, inputs.decode_lengths_B
    chunks = inputs.chunk_slots_C, inputs.chunk_starts_C, inputs.query_starts_C1
    qkv_TC, gates_T2H = delta_prologue(
        x_TN, state.tails_STC, weights.conv_CW, weights.a_log_H, weights.dt_bias_H, *decodes, *chunks,
        num_key_heads=delta.key_heads, key_dim=delta.key_dim, rows=inputs.told_tokens_1, rates_TR=rates_TR,
    )  # fmt: skip
    num_decodes, num_tokens = len(inputs.decode_slots_B), len(x_TN)
    if num_decodes:
        delta_decode(
            qkv_TC[:num_decodes], gates_T2H[:num_decodes], state.states_SHDV, *decodes,
            num_key_heads=delta.key_heads, out_BHV=out_THV[:num_decodes],
        )  # fmt: skip
    if num_decodes < num_tokens:
        delta_prefill(
            qkv_TC[num_decodes:], gates_T2H[num_decodes:], state.states_SHDV, *chunks,
            num_key_heads=delta.key_heads, out_THV=out_THV[num_decodes:],
        )  # fmt: skip


def _try(
    x_TN: Tensor, rates_TR: Tensor | None, inputs: StepInputs, state: LayerState, delta: Delta, weights: DeltaWeights,
    out_THV: Tensor,
) -> None:  # fmt: skip
    """The state stays; what it is to move on by is left behind."""
    assert inputs.tried is not None
    assert state.tries is not None
    left = state.tries.cut(len(x_TN))
    delta_tried_prologue(
        x_TN, state.tails_STC, weights.conv_CW, weights.a_log_H, weights.dt_bias_H, inputs.tried,
        num_key_heads=delta.key_heads, key_dim=delta.key_dim, rates_TR=rates_TR,
        inputs_TC=left.inputs_TC, qkv_TC=left.qkv_TC, gates_T2H=left.gates_T2H,
    )  # fmt: skip
    delta_tried(
        left.qkv_TC, left.gates_T2H, state.states_SHDV, inputs.tried, num_key_heads=delta.key_heads, out_THV=out_THV
    )
