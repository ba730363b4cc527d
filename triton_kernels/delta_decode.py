"""The gated delta rule, or Mamba-2's, of decode rows: one token a sequence, whose state moves on in place.

What a token makes of a state is in `delta_advance.py`; of tokens that are tried, `delta_tried.py` says what they find.

Shape suffixes: B decode rows, C channels (`delta_heads.py`), S slots, H value heads, D numbers of a key, V of a value.
"""

import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.delta_advance import WARPS, add, columns_of, fade, find, load_columns, load_token
from tercet.triton_kernels.delta_heads import DeltaHeads, check_of_heads, check_out, check_rows, check_states
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous


@triton.jit(do_not_specialize=["S"], do_not_specialize_on_alignment=["S"])
def _delta_decode_kernel(
    qkv_ptr, gates_ptr, skip_ptr, states_ptr, slots_ptr, lengths_ptr, out_ptr, S,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, CORRECTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (V / BLOCK_V, H, B): one program owns BLOCK_V columns of a head's state, which go through it once.

    They are loaded before the wait: nobody else in a step touches these states.
    """
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    keys = tl.arange(0, D)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    known = (length > 0) & (slot >= 0) & (slot < S)
    state_ptrs, state = load_columns(states_ptr, slot * H + head, keys, values, known & (length > 1), D, V)
    let_next_start(PDL)
    wait_for_previous(PDL)
    out_ptrs = out_ptr + (row * H + head) * V + values
    if known:
        q, k, v, log_decay, beta = load_token(qkv_ptr, gates_ptr, row, head, keys, values, K, H, D, V)
        state, added = fade(state, k, v, log_decay, beta, CORRECTS)
        found = find(state, added, q, k, v, skip_ptr, head, CORRECTS)
        tl.store(state_ptrs, add(state, k, added, states_ptr).to(states_ptr.dtype.element_ty))
        tl.store(out_ptrs, found.to(out_ptr.dtype.element_ty))
    else:
        tl.store(out_ptrs, tl.zeros((BLOCK_V,), out_ptr.dtype.element_ty))


def delta_decode(
    qkv_BC: Tensor,
    gates_B2H: Tensor,
    states_SHDV: Tensor,
    slots_B: Tensor,
    lengths_B: Tensor,
    *,
    num_key_heads: int,
    out_BHV: Tensor,
    skip_H: Tensor | None = None,
) -> None:
    """Write `out_BHV` and the new state of each row's slot. fp32 inside, rounded once; graph-safe.

    `lengths_B`: tokens of the sequence, this one among them: of 1, the state is taken for zeros, whatever lies there;
    of 0, the row's answer is zeros and no state changes. `skip_H`: by Mamba-2's rule, how much of its value a head
    finds beside (`delta_advance.py`); in fp32. None: by the gated delta rule. A row's bits do not depend on other rows.
    States, slots and lengths are read before the wait: between what wrote them and this there must be a kernel that is
    launched without overlap (see overlap.py).
    """
    heads = check_states(qkv_BC, gates_B2H, states_SHDV, num_key_heads, corrects=skip_H is None)
    if skip_H is not None:
        check_of_heads("skip", skip_H, heads.H, states_SHDV)
    check_out(out_BHV, qkv_BC, heads)
    check_rows(slots_B, lengths_B, qkv_BC, qkv_BC.shape[0])
    B, (K, H, D, V) = qkv_BC.shape[0], heads
    if not use_kernels(qkv_BC):
        delta_decode_reference(
            qkv_BC, gates_B2H, states_SHDV, slots_B, lengths_B, heads=heads, out_BHV=out_BHV, skip_H=skip_H
        )
    elif B:
        block_v, corrects = columns_of(D, V), skip_H is None
        _delta_decode_kernel[(V // block_v, H, B)](
            qkv_BC, gates_B2H, gates_B2H if skip_H is None else skip_H, states_SHDV, slots_B, lengths_B, out_BHV,
            states_SHDV.shape[0],
            K=K, H=H, D=D, V=V, BLOCK_V=block_v, CORRECTS=corrects, num_warps=WARPS, **overlap_options(qkv_BC),
        )  # fmt: skip


def delta_decode_reference(
    qkv_BC: Tensor,
    gates_B2H: Tensor,
    states_SHDV: Tensor,
    slots_B: Tensor,
    lengths_B: Tensor,
    *,
    heads: DeltaHeads,
    out_BHV: Tensor,
    skip_H: Tensor | None = None,
) -> None:
    """The same, row by row: then sums are of one shape, and so of one order, however many rows there are."""
    K, H, D, V = heads
    for row, (slot, length) in enumerate(zip(slots_B.tolist(), lengths_B.tolist(), strict=True)):
        if length <= 0 or not 0 <= slot < states_SHDV.shape[0]:
            out_BHV[row] = 0
            continue
        q, k, v = qkv_BC[row].float().split((K * D, K * D, H * V))
        q_HD1, k_HD1 = (x.view(K, D, 1).repeat_interleave(H // K, 0) for x in (q, k))
        log_decay_H, beta_H = gates_B2H[row].chunk(2)
        state_HDV = states_SHDV[slot].float()
        if length == 1:
            state_HDV.zero_()
        state_HDV *= log_decay_H.exp()[:, None, None]
        v_HV = v.view(H, V)
        missing_HV = v_HV - (state_HDV * k_HD1).sum(1) if skip_H is None else v_HV
        state_HDV += k_HD1 * (missing_HV * beta_H[:, None])[:, None]
        found_HV = (state_HDV * q_HD1).sum(1)
        states_SHDV[slot] = state_HDV
        out_BHV[row] = found_HV if skip_H is None else found_HV + skip_H[:, None] * v_HV
