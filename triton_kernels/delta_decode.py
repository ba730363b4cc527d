"""The gated delta rule of decode rows: one token a sequence, whose state moves on in place.

A head's state decays; what it answers to the key is replaced, as far as beta says, by the value; then the query asks.

Shape suffixes: B decode rows, C channels (`delta_heads.py`), S slots, H value heads, D numbers of a key, V of a value.
"""

from torch import Tensor

from tercet.triton_kernels.delta_heads import DeltaHeads, check_out, check_rows, check_states


def delta_decode(
    qkv_BC: Tensor,
    gates_B2H: Tensor,
    states_SHDV: Tensor,
    slots_B: Tensor,
    lengths_B: Tensor,
    *,
    num_key_heads: int,
    out_BHV: Tensor,
) -> None:
    """Write `out_BHV` and the new state of each row's slot. fp32 inside, rounded once; graph-safe.

    `lengths_B`: tokens of the sequence, this one among them: of 1, the state is taken for zeros, whatever lies there;
    of 0, the row's answer is zeros and no state changes. A row's bits do not depend on other rows.
    """
    heads = check_states(qkv_BC, gates_B2H, states_SHDV, num_key_heads)
    check_out(out_BHV, qkv_BC, heads)
    check_rows(slots_B, lengths_B, qkv_BC, qkv_BC.shape[0])
    delta_decode_reference(qkv_BC, gates_B2H, states_SHDV, slots_B, lengths_B, heads=heads, out_BHV=out_BHV)


def delta_decode_reference(
    qkv_BC: Tensor,
    gates_B2H: Tensor,
    states_SHDV: Tensor,
    slots_B: Tensor,
    lengths_B: Tensor,
    *,
    heads: DeltaHeads,
    out_BHV: Tensor,
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
        state_HDV = states_SHDV[slot]
        if length == 1:
            state_HDV.zero_()
        state_HDV *= log_decay_H.exp()[:, None, None]
        delta_HV = (v.view(H, V) - (state_HDV * k_HD1).sum(1)) * beta_H[:, None]
        state_HDV += k_HD1 * delta_HV[:, None]
        out_BHV[row] = (state_HDV * q_HD1).sum(1)
