"""Rows of the kernel bench for attention of rows that decode, over paged caches, and for what comes before attention.

Head size 128, 8 kv heads, pages of 64 tokens in random order; caches in bf16 and, for the kernels that serve, in FP8.
FlashAttention 3 stands beside them with what it did on an H200, at the better of two numbers of heads.
"""

import random
from collections.abc import Iterator, Sequence

import torch

from kernel_rows import Row
from kernel_timing import Stopwatch
from tercet.triton_kernels.attention import decode_attention
from tercet.triton_kernels.attention_prologue import attention_prologue
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.decode_work import make_decode_work, plan_decode_work
from tercet.triton_kernels.fused_decode import fused_decode_attention, plan_fused_decode
from tercet.triton_kernels.matmul import matmul
from tercet.triton_kernels.matmul_prologue import matmul_prologue

_D, _HEADS, _KV_HEADS, _PAGE = 128, 16, 8, 64
_SCALE = _D**-0.5
_FA3 = "FlashAttention 3, recorded"
_FA3_DECODE_US = {
    "B=1 C=1024": 12.3,
    "B=64 C=1024": 76.0,
    "B=256 C=1024": 267.0,
    "B=64 C=8192": 477.0,
    "B=1 C=32768": 43.5,
    "B=8 C=32768": 245.0,
}


def rows(stopwatch: Stopwatch) -> Iterator[Row]:
    draw = random.Random(0)
    for name, lengths in (
        ("B=1 C=1024", [1024]),
        ("B=8 C=1024", [1024] * 8),
        ("B=64 C=1024", [1024] * 64),
        ("B=256 C=1024", [1024] * 256),
        ("B=256 C=100..2048", [draw.randint(100, 2048) for _ in range(256)]),
        ("B=64 C=8192", [8192] * 64),
        ("B=1 C=32768", [32768]),
        ("B=8 C=32768", [32768] * 8),
    ):
        yield _decode_row(stopwatch, name, lengths)
        for cells in (torch.bfloat16, FP8):
            yield _fused_row(stopwatch, name, lengths, cells)
    for num_tokens in (1, 64, 16384):
        yield _prologue_row(stopwatch, num_tokens)
    for num_heads, K, num_tokens in ((16, 1024, 2048), (16, 1024, 8192), (32, 4096, 2048), (32, 4096, 8192)):
        yield _project_row(stopwatch, num_heads, K, num_tokens)


def _caches(stopwatch: Stopwatch, num_bytes: int, num_pages: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values, several times over. They must not share memory: the second would come from the L2 cache."""

    def cut(copy: int, part: int) -> torch.Tensor:
        return stopwatch.cut(copy * 2**27 + part * 2**29, num_pages, _KV_HEADS, _PAGE, _D)

    return [(cut(copy, 0), cut(copy, 1)) for copy in range(stopwatch.copies(num_bytes))]


def _decode_row(stopwatch: Stopwatch, name: str, lengths: Sequence[int]) -> Row:
    batch, pages_each = len(lengths), -(-max(lengths) // _PAGE)
    num_pages = batch * pages_each + 1
    num_bytes = 4 * _KV_HEADS * _D * sum(lengths)
    caches = _caches(stopwatch, num_bytes, num_pages)
    table, slots, lengths_B = _pages(batch, pages_each), _integers(range(batch)), _integers(lengths)
    q, out = stopwatch.cut(7, batch, _HEADS, _D), _empty(batch, _HEADS, _D)
    work = make_decode_work(batch, num_pages, _PAGE, _HEADS, _KV_HEADS, _D, q.device, deterministic=False)
    plan_decode_work(lengths_B, slots, work, _KV_HEADS)

    def run(index: int) -> None:
        k_cache, v_cache = caches[index]
        decode_attention(q, k_cache, v_cache, table, slots, lengths_B, _SCALE, work=work, out=out)

    return Row(
        kernel="decode_attention",
        shape=f"{name} H={_HEADS}",
        run=run,
        copies=len(caches),
        num_bytes=num_bytes,
        recorded_us=_FA3_DECODE_US.get(name),
        recorded_name=_FA3,
    )


def _fused_row(stopwatch: Stopwatch, name: str, lengths: Sequence[int], cells: torch.dtype) -> Row:
    """With head norms, rotary and the write of the new token's K and V inside."""
    batch, pages_each = len(lengths), -(-max(lengths) // _PAGE)
    num_bytes = 2 * cells.itemsize * _KV_HEADS * _D * sum(lengths)
    # Written to by the kernel: not cut from the pool.
    shape = batch * pages_each + 1, _KV_HEADS, _PAGE, _D
    copies = min(stopwatch.copies(num_bytes), 8)
    caches = [(_empty(*shape).normal_().to(cells), _empty(*shape).normal_().to(cells)) for _ in range(copies)]
    table, slots, lengths_B = _pages(batch, pages_each), _integers(range(batch)), _integers(lengths)
    qkv = stopwatch.cut(7, batch, (_HEADS + 2 * _KV_HEADS) * _D)
    q_norm, k_norm = stopwatch.cut(5, _D), stopwatch.cut(9, _D)
    cos_sin, out = torch.randn(max(lengths), _D, device="cuda"), _empty(batch, _HEADS, _D)
    shares = plan_fused_decode(lengths_B, slots, table, _HEADS, caches[0][0])

    def run(index: int) -> None:
        k_cache, v_cache = caches[index]
        fused_decode_attention(
            qkv, cos_sin, q_norm, k_norm, 1e-6, k_cache, v_cache, table, shares, _HEADS, _SCALE, out_BHD=out
        )

    return Row(
        kernel="fused_decode_attention",
        shape=f"{name} H={_HEADS}{_kind(cells)}",
        run=run,
        copies=len(caches),
        num_bytes=num_bytes,
        recorded_us=None if cells == FP8 else _FA3_DECODE_US.get(name),
        recorded_name=_FA3,
    )


class _Tokens:
    """One prompt from its first token on, and caches for its K and V."""

    def __init__(self, stopwatch: Stopwatch, num_tokens: int) -> None:
        num_pages = -(-num_tokens // _PAGE) + 1
        shape = num_pages, _KV_HEADS, _PAGE, _D
        self.caches = _empty(*shape).zero_(), _empty(*shape).zero_()
        cos_sin = torch.randn(num_tokens, _D, device="cuda")
        kv_slots = torch.arange(_PAGE, _PAGE + num_tokens, device="cuda")
        q_norm, k_norm = stopwatch.cut(5, _D), stopwatch.cut(9, _D)
        self.places = _integers(range(num_tokens)), kv_slots, cos_sin, q_norm, k_norm, 1e-6


def _prologue_row(stopwatch: Stopwatch, num_tokens: int) -> Row:
    num_heads, tokens = 16, _Tokens(stopwatch, num_tokens)
    qkvs = stopwatch.rotation(num_tokens, (num_heads + 2 * _KV_HEADS) * _D)

    def run(index: int) -> None:
        attention_prologue(qkvs[index], *tokens.places, *tokens.caches, num_heads)

    return Row("attention_prologue", f"T={num_tokens} H=16+8", run, len(qkvs), 4.0 * qkvs[0].numel())


def _project_row(stopwatch: Stopwatch, num_heads: int, K: int, num_tokens: int) -> Row:
    """The product of q, k, v with the prologue at its end, and the two apart."""
    N, tokens = (num_heads + 2 * _KV_HEADS) * _D, _Tokens(stopwatch, num_tokens)
    weights, x = stopwatch.rotation(N, K), stopwatch.cut(1 << 30, num_tokens, K) * K**-0.5
    q, qkv = _empty(num_tokens, num_heads, _D), _empty(num_tokens, N)

    def run(index: int) -> None:
        matmul_prologue(x, weights[index], *tokens.places, *tokens.caches, q)

    def apart(index: int) -> None:
        attention_prologue(matmul(x, weights[index], out=qkv), *tokens.places, *tokens.caches, num_heads)

    return Row(
        kernel="matmul_prologue",
        shape=f"T={num_tokens} H={num_heads}+{_KV_HEADS} K={K}",
        run=run,
        copies=len(weights),
        num_bytes=2.0 * (N * K + num_tokens * (N + K)),
        num_flops=2.0 * num_tokens * N * K,
        peer=apart,
        peer_name="apart",
        nodes=4,
    )


def _pages(batch: int, pages_each: int) -> torch.Tensor:
    return (torch.randperm(batch * pages_each, device="cuda").view(batch, pages_each) + 1).int()


def _integers(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.int32, device="cuda")


def _kind(cells: torch.dtype) -> str:
    return " FP8" if cells == FP8 else ""


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")
