"""States behind tokens that were tried: those of all layers at once move on by the tokens that hold.

How many do, the slot table says by then (`accept.py`): a slot's newest token, which the next step computes, is behind
them. What layers made of tokens, they left (`delta_tried_prologue.py`); from that a state's bits come to be those of
as many plain steps (`delta_decode.py`). Its tails are the last inputs of the convolution.

Shape suffixes: L layers, T tokens of the step, as many of each slot (`tried_tokens.py`), or of a slot's tails W - 1,
the oldest first; C channels (`delta_heads.py`), P places, S slots, which have the first of those; H value heads, D
numbers of a key, V of a value.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_contiguous, check_indices, check_same, check_shape
from tercet.triton_kernels.delta_advance import WARPS, add, columns_of, fade, load_columns, load_token
from tercet.triton_kernels.delta_heads import DeltaHeads, check_states
from tercet.triton_kernels.delta_tails import BLOCK, shift_tails
from tercet.triton_kernels.delta_tried import advance_reference
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv, next_power_of_2
from tercet.triton_kernels.tried_tokens import TriedTokens, check_tried

_SIZES = ["room", "P", "S"]


@triton.jit
def _tried_slot(slots_ptr, lengths_ptr, first, S):
    """Of the slot whose first token this is: which it is, tokens up to that one, and whether any is tried."""
    slot = tl.load(slots_ptr + first).to(tl.int64)
    length = tl.load(lengths_ptr + first)
    return slot, length, (length > 0) & (slot >= 0) & (slot < S)


@triton.jit
def _count_kept(known_ptr, slot, length, tries, EACH: tl.constexpr):
    """Its tokens that hold."""
    kept = tl.load(known_ptr + slot, mask=tries, other=0) - length
    return tl.minimum(tl.maximum(kept, 0), EACH)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _settle_states_kernel(
    qkv_ptr, gates_ptr, states_ptr, slots_ptr, lengths_ptr, known_ptr, room, P, S,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, EACH: tl.constexpr, BLOCK_V: tl.constexpr,
    CORRECTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (H V / BLOCK_V, slots, layers): one program owns BLOCK_V columns of a head's state.

    They go through it once, and are loaded before the wait: nobody has written them in this step.
    """
    TILES: tl.constexpr = V // BLOCK_V
    head = tl.program_id(0) // TILES
    layer = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1).to(tl.int64) * EACH
    keys = tl.arange(0, D)
    values = tl.program_id(0) % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    slot, length, tries = _tried_slot(slots_ptr, lengths_ptr, first, S)
    state_ptrs, state = load_columns(
        states_ptr, (layer * P + slot) * H + head, keys, values, tries & (length > 1), D, V
    )  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    kept = _count_kept(known_ptr, slot, length, tries, EACH)
    if kept > 0:
        first += layer * room
        _, k, v, log_decay, beta = load_token(qkv_ptr, gates_ptr, first, head, keys, values, K, H, D, V)
        for place in range(kept):
            row = first + tl.minimum(place + 1, kept - 1)
            _, next_k, next_v, next_log_decay, next_beta = load_token(
                qkv_ptr, gates_ptr, row, head, keys, values, K, H, D, V
            )
            state, added = fade(state, k, v, log_decay, beta, CORRECTS)
            state = add(state, k, added, states_ptr)
            k, v, log_decay, beta = next_k, next_v, next_log_decay, next_beta
        tl.store(state_ptrs, state.to(states_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _settle_tails_kernel(
    inputs_ptr, tails_ptr, slots_ptr, lengths_ptr, known_ptr, room, P, S,
    C: tl.constexpr, KEPT: tl.constexpr, EACH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (C / BLOCK, slots, layers): one program owns the tails of one slot in BLOCK channels."""
    layer = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1).to(tl.int64) * EACH
    let_next_start(PDL)
    wait_for_previous(PDL)
    slot, length, tries = _tried_slot(slots_ptr, lengths_ptr, first, S)
    kept = _count_kept(known_ptr, slot, length, tries, EACH)
    if kept > 0:
        columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
        tails_ptr += (layer * P + slot) * (KEPT * C)
        shift_tails(tails_ptr, inputs_ptr, layer * room + first, kept, length > 1, columns, C, C, KEPT, BLOCK_T)


def delta_settle(
    inputs_LTC: Tensor,
    qkv_LTC: Tensor,
    gates_LT2H: Tensor,
    tails_LPTC: Tensor,
    states_LPHDV: Tensor,
    tried: TriedTokens,
    known_S: Tensor,
    *,
    num_key_heads: int,
    corrects: bool = True,
) -> None:
    """Move tails and states of each slot on by the tokens that hold, in place: `known_S`, tokens of slots, less those
    that `tried` says of the slot's first. Layers may have room for more tokens than there are.
    `corrects`: by the gated delta rule; else by Mamba-2's.

    A slot that tries nothing stays as it is. fp32 inside; graph-safe: two launches. States and `tried` are read before
    the wait: between what wrote them and this there must be a kernel that is launched without overlap (see overlap.py).
    """
    heads = _check(inputs_LTC, qkv_LTC, gates_LT2H, tails_LPTC, states_LPHDV, num_key_heads, corrects)
    num_slots = check_tried(tried, states_LPHDV)
    L, room, C = qkv_LTC.shape
    if len(tried.slots_T) > room:
        raise ValueError(f"slots: got {len(tried.slots_T)} tokens, wanted {room} at most")
    check_indices("known", known_S, states_LPHDV, None)
    P, S, kept = states_LPHDV.shape[1], known_S.shape[0], tails_LPTC.shape[2]
    if S > P:
        raise ValueError(f"known: got {S} slots, wanted {P} at most")
    tables = tried.slots_T, tried.lengths_T, known_S
    if not use_kernels(states_LPHDV):
        delta_settle_reference(
            inputs_LTC, qkv_LTC, gates_LT2H, tails_LPTC, states_LPHDV, tried, known_S, heads=heads, corrects=corrects
        )  # fmt: skip
    elif num_slots and L:
        overlap = overlap_options(states_LPHDV)
        K, H, D, V = heads
        block_v = columns_of(D, V)
        _settle_states_kernel[(H * (V // block_v), num_slots, L)](
            qkv_LTC, gates_LT2H, states_LPHDV, *tables, room, P, S,
            K=K, H=H, D=D, V=V, EACH=tried.each, BLOCK_V=block_v, CORRECTS=corrects, num_warps=WARPS, **overlap,
        )  # fmt: skip
        _settle_tails_kernel[(cdiv(C, BLOCK), num_slots, L)](
            inputs_LTC, tails_LPTC, *tables, room, P, S,
            C=C, KEPT=kept, EACH=tried.each, BLOCK_T=next_power_of_2(kept), BLOCK=BLOCK, num_warps=4, **overlap,
        )  # fmt: skip


def delta_settle_reference(
    inputs_LTC: Tensor,
    qkv_LTC: Tensor,
    gates_LT2H: Tensor,
    tails_LPTC: Tensor,
    states_LPHDV: Tensor,
    tried: TriedTokens,
    known_S: Tensor,
    *,
    heads: DeltaHeads,
    corrects: bool,
) -> None:
    """The same, layer by layer and slot by slot."""
    skip_H = None if corrects else states_LPHDV.new_zeros(heads.H)  # of answers, which nobody wants here
    for slot, first, _ in tried.counts():
        if not 0 <= slot < len(known_S):
            continue
        length = int(tried.lengths_T[first])
        kept = min(max(int(known_S[slot]) - length, 0), tried.each)
        if not kept:
            continue
        own = slice(first, first + kept)
        for layer, tails_PTC in enumerate(tails_LPTC):
            advance_reference(
                qkv_LTC[layer, own], gates_LT2H[layer, own], states_LPHDV[layer, slot : slot + 1], tried.lengths_T[own],
                heads=heads, out_THV=qkv_LTC.new_empty(kept, heads.H, heads.V), skip_H=skip_H,
            )  # fmt: skip
            before_TC = tails_PTC[slot] if length > 1 else torch.zeros_like(tails_PTC[slot])
            tails_PTC[slot] = torch.cat((before_TC, inputs_LTC[layer, own]))[kept:]


def _check(
    inputs_LTC: Tensor, qkv_LTC: Tensor, gates_LT2H: Tensor, tails_LPTC: Tensor, states_LPHDV: Tensor,
    num_key_heads: int, corrects: bool,
) -> DeltaHeads:  # fmt: skip
    """All that is stacked over layers is as the first layer's, or raise."""
    check_shape("qkv", qkv_LTC, None, None, None)
    L, room, C = qkv_LTC.shape
    check_shape("states", states_LPHDV, L, None, None, None, None)
    check_shape("gates", gates_LT2H, L, None, None)
    check_shape("inputs", inputs_LTC, L, room, C)
    check_shape("tails", tails_LPTC, L, states_LPHDV.shape[1], None, C)
    for name, tensor in (("inputs", inputs_LTC), ("tails", tails_LPTC)):
        check_same(name, tensor, qkv_LTC)
    for name, tensor in (("qkv", qkv_LTC), ("gates", gates_LT2H), ("states", states_LPHDV)):
        check_contiguous(name, tensor)
    return check_states(qkv_LTC[0], gates_LT2H[0], states_LPHDV[0], num_key_heads, corrects=corrects)
