"""What a Mamba-2 layer makes of a step's tokens.

Knows the order of the kernels; `Layer` knows the rest of a layer.

Shape suffixes: T tokens of the step (decode rows, then prefill tokens), N what the first product makes of one, H heads
of this rank, V numbers of a value, X of all of them.
"""

from torch import Tensor

from tercet.model.blocks import Mamba
from tercet.model.parallel import Group
from tercet.model.rank_weights import MambaWeights
from tercet.model.states import LayerState
from tercet.triton_kernels.delta_decode import delta_decode
from tercet.triton_kernels.delta_tried import delta_tried
from tercet.triton_kernels.gated_group_norm import gated_group_norm, gated_squares
from tercet.triton_kernels.mamba_prefill import mamba_prefill
from tercet.triton_kernels.mamba_prologue import mamba_prologue
from tercet.triton_kernels.mamba_tried_prologue import mamba_tried_prologue
from tercet.triton_kernels.prepare import StepInputs


def follow_mamba(
    x_TN: Tensor, inputs: StepInputs, state: LayerState, *, mamba: Mamba, weights: MambaWeights, eps: float,
    group: Group,
) -> Tensor:  # fmt: skip
    """[T, N] -> [T, X]; each token's slot has its state behind it then, unless tokens are tried: then `States.settle`
    is to come. `mamba`: this rank's part."""
    out_THV = x_TN.new_empty(len(x_TN), mamba.value_heads, mamba.value_dim)
    follow = _move_on if inputs.tried is None else _try
    follow(x_TN, inputs, state, mamba, weights, out_THV)
    return _norm(out_THV.flatten(1), x_TN, mamba, weights, eps, group, inputs.told_tokens_1)


def _norm(
    out_TX: Tensor, x_TN: Tensor, mamba: Mamba, weights: MambaWeights, eps: float, group: Group, rows: Tensor | None
) -> Tensor:
    sharing = mamba.norm_size // (out_TX.shape[1] // mamba.key_heads)  # ranks, if there is one group here
    squares_PT1 = None
    if sharing > 1:
        first = group.rank // sharing * sharing
        stacked = group.stack(gated_squares(out_TX, x_TN, mamba.channels, rows=rows))
        squares_PT1 = stacked[first : first + sharing]
    return gated_group_norm(
        out_TX, x_TN, mamba.channels, weights.norm_X, mamba.key_heads, eps, rows=rows, squares_PT1=squares_PT1
    )


def _move_on(
    x_TN: Tensor, inputs: StepInputs, state: LayerState, mamba: Mamba, weights: MambaWeights, out_THV: Tensor
) -> None:
    decodes = inputs.decode_slots_B, inputs.decode_lengths_B
    chunks = inputs.chunk_slots_C, inputs.chunk_starts_C, inputs.query_starts_C1
    qkv_TC, gates_T2H = mamba_prologue(
        x_TN, state.tails_STC, weights.conv_CW, weights.conv_bias_C, weights.a_log_H, weights.dt_bias_H, *decodes,
        *chunks, time_steps=mamba.time_steps, rows=inputs.told_tokens_1,
    )  # fmt: skip
    num_decodes, num_tokens = len(inputs.decode_slots_B), len(x_TN)
    if num_decodes:
        delta_decode(
            qkv_TC[:num_decodes], gates_T2H[:num_decodes], state.states_SHDV, *decodes,
            num_key_heads=mamba.key_heads, out_BHV=out_THV[:num_decodes], skip_H=weights.skip_H,
        )  # fmt: skip
    if num_decodes < num_tokens:
        mamba_prefill(
            qkv_TC[num_decodes:], gates_T2H[num_decodes:], weights.skip_H, state.states_SHDV, *chunks,
            num_key_heads=mamba.key_heads, out_THV=out_THV[num_decodes:],
        )  # fmt: skip


def _try(
    x_TN: Tensor, inputs: StepInputs, state: LayerState, mamba: Mamba, weights: MambaWeights, out_THV: Tensor
) -> None:
    """The state stays; what it is to move on by is left behind."""
    assert inputs.tried is not None
    assert state.tries is not None
    left = state.tries.cut(len(x_TN))
    mamba_tried_prologue(
        x_TN, state.tails_STC, weights.conv_CW, weights.conv_bias_C, weights.a_log_H, weights.dt_bias_H, inputs.tried,
        time_steps=mamba.time_steps, inputs_TC=left.inputs_TC, qkv_TC=left.qkv_TC, gates_T2H=left.gates_T2H,
    )  # fmt: skip
    delta_tried(
        left.qkv_TC, left.gates_T2H, state.states_SHDV, inputs.tried, num_key_heads=mamba.key_heads, out_THV=out_THV,
        skip_H=weights.skip_H,
    )  # fmt: skip
