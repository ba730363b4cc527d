"""What one token makes of a head's state: the gated delta rule, for all kernels that take tokens one after the other.

Mamba-2's is the same without the correction: a token's value is added as it is, by its time step in the place of beta,
and a head's part of it, the head's skip, to what the query finds.

They do the same in the same order, so a token's bits are the same in each.

Shape suffixes as in `delta_decode.py`.
"""

import triton
import triton.language as tl

COLUMNS, WARPS = 64, 2
"""Of a state, that one program owns at most, and who sums them up: the same for any number of rows, for the bits."""


@triton.jit
def load_columns(states_ptr, index, keys, values, begun, D: tl.constexpr, V: tl.constexpr):
    """Where the columns `values` of a head's state are, and what is there; zeros unless `begun`: nothing of what a
    slot's former holder has left goes into a sum, not even times zero."""
    state_ptrs = states_ptr + index * (D * V) + keys[:, None] * V + values[None, :]
    return state_ptrs, tl.load(state_ptrs, mask=(keys[:, None] >= 0) & begun, other=0.0).to(tl.float32)


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
def fade(state, k, v, log_decay, beta, CORRECTS: tl.constexpr):
    """The state decays; and what is then to be added for the key: what it answers to that, if it CORRECTS, is replaced,
    as far as beta says, by the value."""
    state *= tl.exp(log_decay)
    added = v
    if CORRECTS:
        added -= tl.sum(state * k[:, None], 0)
    return state, added * beta


@triton.jit
def find(state, added, q, k, v, skip_ptr, head, CORRECTS: tl.constexpr):
    """What the query finds, summed up from the state before: so both sums wait for the same load, and for nothing
    else."""
    found = tl.sum(state * q[:, None], 0) + tl.sum(q * k) * added
    if not CORRECTS:
        found += tl.load(skip_ptr + head) * v
    return found


@triton.jit
def add(state, k, added, states_ptr):
    """The state behind the token, rounded as it is kept. Fused by hand: left to itself the compiler fuses the decay in
    its place where nothing else reads what has decayed, which makes other bits."""
    return tl.fma(k[:, None], added[None, :], state).to(states_ptr.dtype.element_ty).to(tl.float32)


def columns_of(key_dim: int, value_dim: int) -> int:
    """Of a state with keys and values of so many numbers, that one program owns."""
    columns = COLUMNS if key_dim <= 128 else COLUMNS // 2
    while value_dim % columns:
        columns //= 2
    return columns
