"""Rows of the kernel bench for Mamba-2 layers: of Granite 4.0 tiny and small, and Nemotron 3 Nano.

What must move in decode are the states, in fp32, there and back; in prefill what comes in and goes out, and what must
be computed are the products of tiles of 64 tokens.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from kernel_rows import Row
from kernel_timing import Stopwatch
from tercet.triton_kernels.delta_decode import delta_decode
from tercet.triton_kernels.delta_prefill import TILE
from tercet.triton_kernels.gated_group_norm import gated_group_norm
from tercet.triton_kernels.mamba_prefill import mamba_prefill
from tercet.triton_kernels.mamba_prologue import mamba_prologue

_STATE, _HEAD, _TAPS = 128, 64, 4


class _Layer(NamedTuple):
    name: str
    num_heads: int
    num_groups: int

    @property
    def values(self) -> int:
        return self.num_heads * _HEAD

    @property
    def channels(self) -> int:
        return 2 * self.num_groups * _STATE + self.values


_LAYERS = _Layer("tiny", 48, 1), _Layer("small", 128, 1), _Layer("nano", 64, 8)


def rows(stopwatch: Stopwatch) -> Iterator[Row]:
    for layer in _LAYERS:
        for batch in (1, 8, 64, 256):
            yield _decode_row(stopwatch, layer, batch)
        for lengths in ([8192], [1024] * 8, [64] * 16, [1024]):
            yield _prefill_row(stopwatch, layer, lengths)
        for num_rows, num_tokens in ((1, 0), (64, 0), (256, 0), (0, 1024), (0, 8192)):
            yield _prologue_row(stopwatch, layer, num_rows, num_tokens)
            yield _norm_row(stopwatch, layer, num_rows + num_tokens)


def _decode_row(stopwatch: Stopwatch, layer: _Layer, batch: int) -> Row:
    state = layer.values * _STATE
    copies = min(stopwatch.copies(4 * batch * state), 16)
    states = torch.randn(copies, batch, layer.num_heads, _STATE, _HEAD, device="cuda")
    qkv, gates, skip = _heads(stopwatch, layer, batch)
    slots, lengths = _integers(range(batch)), _integers([99] * batch)
    out = _empty(batch, layer.num_heads, _HEAD)

    def run(index: int) -> None:
        delta_decode(
            qkv, gates, states[index], slots, lengths, num_key_heads=layer.num_groups, out_BHV=out, skip_H=skip
        )  # fmt: skip

    return Row("mamba_decode", f"B={batch} {layer.name}", run, copies, 8.0 * batch * state, 5.0 * batch * state)


def _prefill_row(stopwatch: Stopwatch, layer: _Layer, lengths: list[int]) -> Row:
    num_tokens, num_chunks = sum(lengths), len(lengths)
    qkv, gates, skip = _heads(stopwatch, layer, num_tokens)
    states = torch.zeros(num_chunks, layer.num_heads, _STATE, _HEAD, device="cuda")
    begins = [sum(lengths[:chunk]) for chunk in range(num_chunks + 1)]
    chunks = _integers(range(num_chunks)), _integers([0] * num_chunks), _integers(begins)
    out = _empty(num_tokens, layer.num_heads, _HEAD)

    def run(index: int) -> None:
        mamba_prefill(qkv, gates, skip, states, *chunks, num_key_heads=layer.num_groups, out_THV=out)

    # Of a tile and head: in it queries by keys, and that by values; two with the state.
    flops = 2.0 * num_tokens * layer.num_heads * (TILE * (_STATE + _HEAD) + 2 * _STATE * _HEAD)
    num_bytes = 2.0 * (qkv.numel() + out.numel()) + 4.0 * gates.numel() + 4.0 * states.numel()
    return Row("mamba_prefill", f"S={lengths[0]} B={num_chunks} {layer.name}", run, 1, num_bytes, flops, nodes=2)


def _prologue_row(stopwatch: Stopwatch, layer: _Layer, num_rows: int, num_tokens: int) -> Row:
    count, channels = num_rows + num_tokens, layer.channels
    x = stopwatch.rotation(count, channels + layer.values + layer.num_heads)
    tails, conv = _empty(num_rows + 1, _TAPS - 1, channels).zero_(), stopwatch.cut(5, channels, _TAPS)
    bias, (a_log, dt_bias) = _empty(channels).zero_(), torch.rand(2, layer.num_heads, device="cuda")
    slots, lengths = _integers(range(num_rows)), _integers([99] * num_rows)
    chunks = _integers([num_rows]), _integers([0]), _integers([0, num_tokens])
    if not num_tokens:
        chunks = _integers([]), _integers([]), _integers([0])

    def run(index: int) -> None:
        mamba_prologue(
            x[index], tails, conv, bias, a_log, dt_bias, slots, lengths, *chunks, time_steps=(0.0, float("inf")),
            rows=None,
        )  # fmt: skip

    num_bytes = 4.0 * count * channels + 10.0 * count * layer.num_heads + 4.0 * (_TAPS - 1) * num_rows * channels
    return Row("mamba_prologue", f"B={num_rows} T={num_tokens} {layer.name}", run, len(x), num_bytes)


def _norm_row(stopwatch: Stopwatch, layer: _Layer, count: int) -> Row:
    z = stopwatch.rotation(count, layer.channels + layer.values + layer.num_heads)
    x, weight = stopwatch.cut(3, count, layer.values), torch.rand(layer.values, device="cuda")

    def run(index: int) -> None:
        gated_group_norm(x, z[index], layer.channels, weight, layer.num_groups, 1e-6, rows=None)

    return Row("gated_group_norm", f"T={count} {layer.name}", run, len(z), 6.0 * count * layer.values)


def _heads(stopwatch: Stopwatch, layer: _Layer, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens as a prologue leaves them: keys and queries of about length 1; and each head's skip."""
    qkv = stopwatch.cut(11, count, layer.channels) * _STATE**-0.5
    gates = torch.rand(count, 2, layer.num_heads, device="cuda")
    gates[:, 0] *= -1
    return qkv, gates.flatten(1), torch.rand(layer.num_heads, device="cuda")


def _integers(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.int32, device="cuda")


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")
