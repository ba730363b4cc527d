"""What one token makes of a head's state: the gated delta rule, for all kernels that take tokens one after the other.

They do the same in the same order, so a token's bits are the same in each.

Shape suffixes as in `delta_decode.py`.
"""

import triton
import triton.language as tl

COLUMNS, WARPS = 64, 2
"""Of a state, that one program owns, and who sums them up: the same for any number of rows, for the bits."""


@triton.jit
def load_columns(states_ptr, index, keys, values, begun, D: tl.constexpr, V: tl.constexpr):
    """Where the columns `values` of a head's state are, and what is there; zeros unless `begun`: nothing of what a
    slot's former holder has left goes into a sum, not even times zero."""
    state_ptrs = states_ptr + index * (D * V) + keys[:, None] * V + values[None, :]
    return state_ptrs, tl.load(state_ptrs, mask=(keys[:, None] >= 0) & begun, other=0.0)


@triton.jit
def load_token(
    qkv_ptr, gates_ptr, row, head, keys, values,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A head's query, key, some numbers of its value, log decay and beta. `row`: int64."""
    qkv_ptr += row * (2 * K * D + H * V)
    key_head = head // (H // K)
    q = tl.load(qkv_ptr + key_head * D + keys).to(tl.float32)
    k = tl.load(qkv_ptr + (K + key_head) * D + keys).to(tl.float32)
    v = tl.load(qkv_ptr + 2 * K * D + head * V + values).to(tl.float32)
    log_decay = tl.load(gates_ptr + row * (2 * H) + head)
    beta = tl.load(gates_ptr + row * (2 * H) + H + head)
    return q, k, v, log_decay, beta


@triton.jit
def fade(state, k, v, log_decay, beta):
    """The state decays; and what is then to be added for the key: what it answers to that is replaced, as far as beta
    says, by the value."""
    state *= tl.exp(log_decay)
    return state, (v - tl.sum(state * k[:, None], 0)) * beta


@triton.jit
def find(state, added, q, k):
    """What the query finds, summed up from the state before: so both sums wait for the same load, and for nothing
    else."""
    return tl.sum(state * q[:, None], 0) + tl.sum(q * k) * added
