"""Rows of the kernel bench for gated delta layers: of Qwen3-Next's and Qwen3.5's 16 key heads and 16 to 48 value heads.

What must move in decode are the states, in fp32, there and back; in prefill what comes in and goes out, and what must
be computed are the products of tiles of 64 tokens, their triangular inverses aside.
"""

from collections.abc import Iterator, Sequence

import torch

from kernel_rows import Row
from kernel_timing import Stopwatch
from tercet.triton_kernels.copy_places import copy_places
from tercet.triton_kernels.delta_decode import delta_decode
from tercet.triton_kernels.delta_prefill import TILE, delta_prefill
from tercet.triton_kernels.delta_prologue import delta_prologue
from tercet.triton_kernels.gated_head_norm import gated_head_norm
from tercet.triton_kernels.sigmoid_gate import gate_by_sigmoid

_KEY_HEADS, _DIM, _TAPS = 16, 128, 4


def rows(stopwatch: Stopwatch) -> Iterator[Row]:
    for num_heads in (16, 32, 48):
        for batch in (1, 8, 64, 256):
            yield _decode_row(stopwatch, num_heads, batch)
    for num_heads, lengths in (
        (32, [8192]),
        (32, [1024] * 8),
        (32, [64] * 16),
        (32, [1024]),
        (16, [8192]),
        (48, [8192]),
    ):
        yield _prefill_row(stopwatch, num_heads, lengths)
    for num_heads in (16, 32, 48):
        for num_rows, num_tokens in ((1, 0), (64, 0), (256, 0), (0, 1024), (0, 8192)):
            yield _prologue_row(stopwatch, num_heads, num_rows, num_tokens)
            yield from _gate_rows(stopwatch, num_heads, num_rows + num_tokens)
    for num_pairs in (1, 16):
        yield _copy_row(num_pairs)


def _decode_row(stopwatch: Stopwatch, num_heads: int, batch: int) -> Row:
    state = num_heads * _DIM * _DIM
    num_bytes = 8.0 * batch * state
    copies = min(stopwatch.copies(4 * batch * state), 16)
    states = torch.randn(copies, batch, num_heads, _DIM, _DIM, device="cuda")
    qkv, gates = _heads(stopwatch, num_heads, batch)
    slots, lengths = _integers(range(batch)), _integers([99] * batch)
    out = _empty(batch, num_heads, _DIM)

    def run(index: int) -> None:
        delta_decode(qkv, gates, states[index], slots, lengths, num_key_heads=_KEY_HEADS, out_BHV=out)

    flops = 7.0 * batch * state
    return Row("delta_decode", f"B={batch} H={num_heads}", run, copies, num_bytes, flops)


def _prefill_row(stopwatch: Stopwatch, num_heads: int, lengths: list[int]) -> Row:
    num_tokens, num_chunks = sum(lengths), len(lengths)
    qkv, gates = _heads(stopwatch, num_heads, num_tokens)
    states = torch.zeros(num_chunks, num_heads, _DIM, _DIM, device="cuda")
    begins = [sum(lengths[:chunk]) for chunk in range(num_chunks + 1)]
    chunks = _integers(range(num_chunks)), _integers([0] * num_chunks), _integers(begins)
    out = _empty(num_tokens, num_heads, _DIM)

    def run(index: int) -> None:
        delta_prefill(qkv, gates, states, *chunks, num_key_heads=_KEY_HEADS, out_THV=out)

    # Of a tile and head: in it keys by keys, queries by keys, and three with values or keys; three with the state.
    flops = 2.0 * num_tokens * num_heads * (5 * TILE * _DIM + 3 * _DIM * _DIM)
    num_bytes = 2.0 * (qkv.numel() + out.numel()) + 4.0 * gates.numel() + 4.0 * states.numel()
    shape = f"S={lengths[0]} B={num_chunks} H={num_heads}"
    return Row("delta_prefill", shape, run, 1, num_bytes, flops, nodes=4)


def _prologue_row(stopwatch: Stopwatch, num_heads: int, num_rows: int, num_tokens: int) -> Row:
    channels = 2 * _KEY_HEADS * _DIM + num_heads * _DIM
    count = num_rows + num_tokens
    x = stopwatch.rotation(count, channels + num_heads * _DIM + 2 * num_heads)
    tails, conv = _empty(num_rows + 1, _TAPS - 1, channels).zero_(), stopwatch.cut(5, channels, _TAPS)
    a_log, dt_bias = torch.rand(2, num_heads, device="cuda")
    slots, lengths = _integers(range(num_rows)), _integers([99] * num_rows)
    chunks = _integers([num_rows]), _integers([0]), _integers([0, num_tokens])
    if not num_tokens:
        chunks = _integers([]), _integers([]), _integers([0])

    def run(index: int) -> None:
        delta_prologue(
            x[index], tails, conv, a_log, dt_bias, slots, lengths, *chunks, num_key_heads=_KEY_HEADS, key_dim=_DIM,
            rows=None,
        )  # fmt: skip

    num_bytes = 4.0 * count * channels + 12.0 * count * num_heads + 4.0 * (_TAPS - 1) * num_rows * channels
    return Row("delta_prologue", f"B={num_rows} T={num_tokens} H={num_heads}", run, len(x), num_bytes)


def _gate_rows(stopwatch: Stopwatch, num_heads: int, count: int) -> Iterator[Row]:
    channels, numbers = 2 * _KEY_HEADS * _DIM + num_heads * _DIM, num_heads * _DIM
    z = stopwatch.rotation(count, channels + numbers + 2 * num_heads)
    x, weight = stopwatch.cut(3, count, num_heads, _DIM), torch.rand(_DIM, device="cuda")
    flat = x.flatten(1).clone()

    def norm(index: int) -> None:
        gated_head_norm(x, z[index], channels, weight, 1e-6, rows=None)

    def gate(index: int) -> None:
        gate_by_sigmoid(flat, z[index], channels, rows=None)

    for name, run in (("gated_head_norm", norm), ("gate_by_sigmoid", gate)):
        yield Row(name, f"T={count} H={num_heads}", run, len(z), 6.0 * count * numbers)


def _copy_row(num_pairs: int) -> Row:
    num_layers, num_heads = 36, 32
    pools = torch.zeros(num_layers, 2 * num_pairs, num_heads, _DIM, _DIM, device="cuda")
    pairs = _integers(range(2 * num_pairs)).view(-1, 2)

    def run(index: int) -> None:
        copy_places(pools, pairs)

    return Row("copy_places", f"P={num_pairs} {num_layers} layers", run, 1, 4.0 * pools.numel(), nodes=4)


def _heads(stopwatch: Stopwatch, num_heads: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens as a prologue leaves them: keys and queries of about length 1, gates between what is possible."""
    qkv = stopwatch.cut(11, count, 2 * _KEY_HEADS * _DIM + num_heads * _DIM) * _DIM**-0.5
    gates = torch.rand(count, 2, num_heads, device="cuda")
    gates[:, 0] *= -1
    return qkv, gates.flatten(1)


def _integers(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.int32, device="cuda")


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")
