"""The gated delta rule, or Mamba-2's, of tokens that are tried: several of a slot, one after the other, from its state,
which stays.

A state cannot be taken back. So what tokens make of it is left out of memory until it is known which of them hold:
`delta_settle.py` goes through those again. A token's bits are those that it has as a decode row (`delta_decode.py`).

Shape suffixes: T tokens, as many of each slot (`tried_tokens.py`), C channels (`delta_heads.py`), S slots, H value
heads, D numbers of a key, V of a value.
"""

import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.delta_advance import WARPS, add, columns_of, fade, find, load_columns, load_token
from tercet.triton_kernels.delta_decode import delta_decode_reference
from tercet.triton_kernels.delta_heads import DeltaHeads, check_of_heads, check_out, check_states
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import next_power_of_2
from tercet.triton_kernels.tried_tokens import TriedTokens, check_tried


@triton.jit(do_not_specialize=["S"], do_not_specialize_on_alignment=["S"])
def _delta_tried_kernel(
    qkv_ptr, gates_ptr, skip_ptr, states_ptr, slots_ptr, lengths_ptr, out_ptr, S,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, EACH: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr, CORRECTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (V / BLOCK_V, H, slots): one program owns BLOCK_V columns of a head's state, which it only reads.

    They are loaded before the wait, as by decode rows; while a token is computed the next one's numbers are on their
    way.
    """
    head = tl.program_id(1)
    first = tl.program_id(2).to(tl.int64) * EACH
    slot = tl.load(slots_ptr + first).to(tl.int64)
    length = tl.load(lengths_ptr + first)
    keys = tl.arange(0, D)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    known = (length > 0) & (slot >= 0) & (slot < S)
    _, state = load_columns(states_ptr, slot * H + head, keys, values, known & (length > 1), D, V)
    places = tl.arange(0, BLOCK_E)
    lengths = tl.load(lengths_ptr + first + places, mask=known & (places < EACH), other=0)
    count = tl.sum((lengths > 0).to(tl.int32))
    let_next_start(PDL)
    wait_for_previous(PDL)
    out_ptrs = out_ptr + (first * H + head) * V + values
    if count > 0:
        q, k, v, log_decay, beta = load_token(qkv_ptr, gates_ptr, first, head, keys, values, K, H, D, V)
        for place in range(count):
            row = first + tl.minimum(place + 1, count - 1)
            next_q, next_k, next_v, next_log_decay, next_beta = load_token(
                qkv_ptr, gates_ptr, row, head, keys, values, K, H, D, V
            )
            state, added = fade(state, k, v, log_decay, beta, CORRECTS)
            found = find(state, added, q, k, v, skip_ptr, head, CORRECTS)
            state = add(state, k, added, states_ptr)
            tl.store(out_ptrs + place * (H * V), found.to(out_ptr.dtype.element_ty))
            q, k, v, log_decay, beta = next_q, next_k, next_v, next_log_decay, next_beta
    for place in range(count, EACH):
        tl.store(out_ptrs + place * (H * V), tl.zeros((BLOCK_V,), out_ptr.dtype.element_ty))


def delta_tried(
    qkv_TC: Tensor,
    gates_T2H: Tensor,
    states_SHDV: Tensor,
    tried: TriedTokens,
    *,
    num_key_heads: int,
    out_THV: Tensor,
    skip_H: Tensor | None = None,
) -> None:
    """Write `out_THV`: what each token finds behind those of its slot that are ahead of it; zeros where nothing is
    tried. States stay as they are. fp32 inside, rounded once; graph-safe.

    Of a slot's first token, of length 1, the state is taken for zeros. A token's bits do not depend on other slots, nor
    on how many are tried behind it. States, `tried` and `skip_H` are as of `delta_decode`.
    """
    heads = check_states(qkv_TC, gates_T2H, states_SHDV, num_key_heads, corrects=skip_H is None)
    if skip_H is not None:
        check_of_heads("skip", skip_H, heads.H, states_SHDV)
    check_out(out_THV, qkv_TC, heads)
    num_slots = check_tried(tried, qkv_TC, qkv_TC.shape[0])
    if not use_kernels(qkv_TC):
        delta_tried_reference(
            qkv_TC, gates_T2H, states_SHDV, tried, heads=heads, out_THV=out_THV, skip_H=skip_H
        )  # fmt: skip
    elif num_slots:
        K, H, D, V = heads
        block_v, corrects = columns_of(D, V), skip_H is None
        _delta_tried_kernel[(V // block_v, H, num_slots)](
            qkv_TC, gates_T2H, gates_T2H if skip_H is None else skip_H, states_SHDV, tried.slots_T, tried.lengths_T,
            out_THV, states_SHDV.shape[0],
            K=K, H=H, D=D, V=V, EACH=tried.each, BLOCK_E=next_power_of_2(tried.each), BLOCK_V=block_v,
            CORRECTS=corrects, num_warps=WARPS, **overlap_options(qkv_TC),
        )  # fmt: skip


def delta_tried_reference(
    qkv_TC: Tensor, gates_T2H: Tensor, states_SHDV: Tensor, tried: TriedTokens, *, heads: DeltaHeads, out_THV: Tensor,
    skip_H: Tensor | None = None,
) -> None:  # fmt: skip
    """The same: decode rows behind each other, on a copy of the state."""
    out_THV.zero_()
    for slot, first, count in tried.counts():
        if 0 <= slot < states_SHDV.shape[0]:
            state_1HDV, own = states_SHDV[slot : slot + 1].clone(), slice(first, first + count)
            advance_reference(
                qkv_TC[own], gates_T2H[own], state_1HDV, tried.lengths_T[own], heads=heads, out_THV=out_THV[own],
                skip_H=skip_H,
            )  # fmt: skip


def advance_reference(
    qkv_TC: Tensor, gates_T2H: Tensor, state_1HDV: Tensor, lengths_T: Tensor, *, heads: DeltaHeads, out_THV: Tensor,
    skip_H: Tensor | None,
) -> None:  # fmt: skip
    """Tokens of one slot, which are decode rows of steps of their own."""
    slots_1 = lengths_T.new_zeros(1)
    for token in range(len(qkv_TC)):
        own = slice(token, token + 1)
        delta_decode_reference(
            qkv_TC[own], gates_T2H[own], state_1HDV, slots_1, lengths_T[own], heads=heads, out_BHV=out_THV[own],
            skip_H=skip_H,
        )  # fmt: skip
