"""Rows of the kernel bench for prefill attention: causal, within windows, with sinks; pages of 64 tokens in random
order, caches in bf16 and in FP8.

The peer of what is plain is cuDNN's attention, through torch; FlashAttention 3 stands beside both with what it did on
an H200, at the better of two numbers of heads.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernel_rows import Row
from kernel_timing import Stopwatch
from tercet.triton_kernels.attention import plan_prefill, prefill_attention
from tercet.triton_kernels.attention_reference import Scoring
from tercet.triton_kernels.checks import FP8

_PAGE = 64
_FA3_TFLOP_PER_S = {(1024, 16): 418.0, (8192, 2): 629.0, (32768, 1): 660.0}
"""By length and batch."""


@dataclass(frozen=True)
class _Heads:
    q: int
    kv: int = 8
    dim: int = 128
    window: int = 0
    sinks: bool = False
    of: str = ""

    @property
    def name(self) -> str:
        window = f" window={self.window}" if self.window else ""
        return f"H={self.q}{f' of {self.dim}' if self.of else ''}{window}{self.of and f', {self.of}'}"

    def num_pairs(self, length: int) -> int:
        """Of a query and a key that it sees, in a prompt of so many tokens."""
        seen = min(self.window or length, length)
        return seen * (seen + 1) // 2 + (length - seen) * seen


_GPT_OSS, _GEMMA_4B, _GEMMA_27B = "gpt-oss", "Gemma 3 4B", "Gemma 3 27B"
_PLAIN = ((16, 1024, 16), (16, 2048, 1), (16, 8192, 1), (16, 8192, 2), (32, 8192, 2), (16, 32768, 1))
_OTHERS = (
    _Heads(64, 8, 64, 0, True, _GPT_OSS),
    _Heads(64, 8, 64, 128, True, _GPT_OSS),
    _Heads(8, 4, 256, 1024, False, _GEMMA_4B),
    _Heads(32, 16, 128, 1024, False, _GEMMA_27B),
)


def rows(stopwatch: Stopwatch) -> Iterator[Row]:
    for num_heads, length, batch in _PLAIN:
        for cells in (torch.bfloat16, FP8):
            yield _row(stopwatch, _Heads(num_heads), length, batch, cells)
    for heads in _OTHERS:
        for length in (512, 2048, 8192):
            yield _row(stopwatch, heads, length, 1, torch.bfloat16)


def _row(stopwatch: Stopwatch, heads: _Heads, length: int, batch: int, cells: torch.dtype) -> Row:
    pages_each, scale = length // _PAGE, heads.dim**-0.5
    shape = batch * pages_each + 1, heads.kv, _PAGE, heads.dim
    k_cache, v_cache = (stopwatch.cut(part * 2**28, *shape).to(cells) for part in range(2))
    table = (torch.randperm(batch * pages_each, device="cuda").view(batch, pages_each) + 1).int()
    chunks = _integers(range(batch)), _integers([0] * batch), _integers(range(0, (batch + 1) * length, length))
    q = stopwatch.cut(3, batch * length, heads.q, heads.dim)
    sinks_H, out = stopwatch.cut(11, heads.q) if heads.sinks else None, torch.empty_like(q)
    scoring = Scoring(scale, heads.window, sinks_H=sinks_H)
    work = plan_prefill(*chunks, batch * length, heads.q, k_cache, scoring)

    def run(index: int) -> None:
        prefill_attention(
            q, k_cache, v_cache, table, *chunks, scale, work=work, window=heads.window, sinks_H=sinks_H, out=out
        )

    flops = 4.0 * batch * heads.q * heads.num_pairs(length) * heads.dim
    plain = cells != FP8 and not heads.of
    recorded = _FA3_TFLOP_PER_S.get((length, batch)) if plain else None
    return Row(
        kernel="prefill_attention",
        shape=f"S={length} B={batch} {heads.name}{' FP8' if cells == FP8 else ''}",
        run=run,
        copies=1,
        num_bytes=8.0 * q.numel(),
        num_flops=flops,
        peer=_cudnn(stopwatch, batch, heads, length) if plain else None,
        peer_name="cuDNN",
        recorded_us=flops / recorded / 1e6 if recorded else None,
        recorded_name="FlashAttention 3, recorded",
        nodes=4,
    )


def _cudnn(stopwatch: Stopwatch, batch: int, heads: _Heads, length: int) -> Callable[[int], object]:
    q, k, v = (stopwatch.cut(part * 2**28, batch, heads.q, length, heads.dim) for part in range(3))

    def run(index: int) -> object:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return run


def _integers(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.int32, device="cuda")
