"""Rows of the kernel bench for decode attention of Gemma 4: heads of 256 with windows, and heads of 512 without.

From q, k, v rows to attended heads, norms of values included; pages of 64 tokens in random order. The fused kernels,
each that may serve such rows, stand beside the prologue and the portable kernel.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_rows import Row
from kernel_timing import Stopwatch
from tercet.triton_kernels.attention import decode_attention
from tercet.triton_kernels.attention_prologue import attention_prologue
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.decode_shares import DecodeShares
from tercet.triton_kernels.decode_work import make_decode_work, plan_decode_work
from tercet.triton_kernels.few_rows import FewRows
from tercet.triton_kernels.fixed_splits import FixedSplits
from tercet.triton_kernels.fused_decode import LONG, FusedPlan, fused_decode_attention, plan_fused_decode

_PAGE, _EPS = 64, 1e-6
_WAYS = {FewRows: "few", DecodeShares: "many", FixedSplits: "fixed"}
_MOST_FEW = 4
"""Rows up to which the kernel for few rows stands beside the one made for bandwidth."""


@dataclass(frozen=True)
class _Layer:
    name: str
    heads: int
    kv_heads: int
    dim: int
    window: int = 0


_LAYERS = (
    _Layer("E2B, window", 8, 1, 256, 512),
    _Layer("E2B, all", 8, 1, 512),
    _Layer("E4B, window", 8, 2, 256, 512),
    _Layer("E4B, all", 8, 2, 512),
    _Layer("26B, window", 16, 8, 256, 1024),
    _Layer("26B, all", 16, 2, 512),
    _Layer("31B, window", 32, 16, 256, 1024),
    _Layer("31B, all", 32, 4, 512),
)
_STEPS = ((1, 1024), (4, 1024), (8, 1024), (64, 1024), (256, 1024), (1, 8192), (1, 32768), (64, 8192))
_ROWS_IN_WINDOWS = (1, 4, 8, 64, 256)
"""Rows, and tokens of each; and rows of twice as many as their window."""


def rows(stopwatch: Stopwatch) -> Iterator[Row]:
    for layer in _LAYERS:
        in_windows = [(batch, 2 * layer.window) for batch in _ROWS_IN_WINDOWS]
        for batch, length in in_windows if layer.window else _STEPS:
            step = _Step(stopwatch, layer, batch, length, torch.bfloat16)
            if batch <= _MOST_FEW:
                yield step.row(step.plan(longest=length))
            if batch > (_MOST_FEW if layer.window else 1):  # else it is for few rows all the same
                yield step.row(step.plan(longest=LONG))
            yield step.row(step.plan(deterministic=True))
        step = _Step(stopwatch, layer, 64, 2 * layer.window or 1024, FP8)
        yield step.row(step.plan(longest=LONG))


class _Step:
    """Rows of one length, and caches several times over."""

    def __init__(self, stopwatch: Stopwatch, layer: _Layer, batch: int, length: int, cells: torch.dtype) -> None:
        self.layer, self.batch, self.length = layer, batch, length
        pages_each = -(-length // _PAGE)
        num_pages = batch * pages_each + 1
        seen = min(layer.window or length, length)
        self.num_bytes = 2 * cells.itemsize * batch * seen * layer.kv_heads * layer.dim
        shape = num_pages, layer.kv_heads, _PAGE, layer.dim
        # Written to by the kernels: not cut from the pool.
        self.caches = [
            (_empty(*shape).normal_().to(cells), _empty(*shape).normal_().to(cells))
            for _ in range(min(stopwatch.copies(self.num_bytes), 8))
        ]
        table = torch.randperm(batch * pages_each, device="cuda").view(batch, pages_each) + 1
        self.table, self.slots = table.int(), torch.arange(batch, dtype=torch.int32, device="cuda")
        self.lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        self.positions = self.lengths - 1
        self.qkv = stopwatch.cut(7, batch, (layer.heads + 2 * layer.kv_heads) * layer.dim)
        self.norms = stopwatch.cut(5, layer.dim), stopwatch.cut(9, layer.dim)
        self.cos_sin = torch.randn(length, layer.dim, device="cuda")
        self.out = _empty(batch, layer.heads, layer.dim)
        self.kv_slots = table[:, -1] * _PAGE + (length - 1) % _PAGE
        self.work = make_decode_work(
            batch, num_pages, _PAGE, layer.heads, layer.kv_heads, layer.dim, self.qkv.device, deterministic=False,
            window=layer.window,
        )  # fmt: skip
        plan_decode_work(self.lengths, self.slots, self.work, layer.kv_heads)

    def plan(self, *, longest: int = 0, deterministic: bool = False) -> FusedPlan:
        plan = plan_fused_decode(
            self.lengths, self.slots, self.table, self.layer.heads, self.caches[0][0], window=self.layer.window,
            deterministic=deterministic, longest=longest,
        )  # fmt: skip
        torch.cuda.synchronize()  # in a step a kernel without overlap is between what plans and what reads the plan
        return plan

    def row(self, plan: FusedPlan) -> Row:
        way = _WAYS[type(plan)] + " FP8" * (self.caches[0][0].dtype == FP8)
        return Row(
            kernel="fused_decode_attention",
            shape=f"{self.layer.name} B={self.batch} C={self.length} {way}",
            run=lambda index: self._fused(plan, *self.caches[index]),
            copies=len(self.caches),
            num_bytes=self.num_bytes,
            peer=lambda index: self._apart(*self.caches[index]),
            peer_name="prologue and portable kernel",
        )

    def _fused(self, plan: FusedPlan, k_cache: Tensor, v_cache: Tensor) -> None:
        fused_decode_attention(
            self.qkv, self.cos_sin, *self.norms, _EPS, k_cache, v_cache, self.table, plan, self.layer.heads, 1.0,
            self.out, norm_values=True,
        )  # fmt: skip

    def _apart(self, k_cache: Tensor, v_cache: Tensor) -> None:
        q = attention_prologue(
            self.qkv, self.positions, self.kv_slots, self.cos_sin, *self.norms, _EPS, k_cache, v_cache,
            self.layer.heads, norm_values=True,
        )  # fmt: skip
        decode_attention(
            q, k_cache, v_cache, self.table, self.slots, self.lengths, 1.0, work=self.work, window=self.layer.window,
            out=self.out,
        )  # fmt: skip


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")
