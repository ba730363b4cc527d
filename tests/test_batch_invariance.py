"""Deterministic mode, kernel by kernel: a row's bits are the same alone, among others, anywhere, and at every size.

On a GPU with the real shapes and every tuned variant; what does not depend on how a processor sums also in Triton's
interpreter. Attention goes further: however a prompt is cut into chunks, it gets the same bits. (What is generated is
never computed as part of a prompt in this mode: the planner sees to that.)
"""

import random
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from covering import long
from interpreted import rerun_interpreted
from paged_attention import Heads, PagedCache
from slot_tables import random_table
from tercet.triton_kernels import add_rms_norm as norm_module
from tercet.triton_kernels.add_rms_norm import add_rms_norm, rms_norm
from tercet.triton_kernels.attention_prologue import attention_prologue
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.dispatch import INTERPRETED, gpu_name
from tercet.triton_kernels.log_probabilities import log_probabilities
from tercet.triton_kernels.matmul import (
    matmul,
    matmul_add,
    matmul_silu_and_mul,
    rms_norm_matmul,
    rms_norm_matmul_silu_and_mul,
)
from tercet.triton_kernels.matmul_launch import launch_matmul
from tercet.triton_kernels.sample import sample
from tercet.triton_kernels.silu_and_mul import silu_and_mul
from tercet.triton_kernels.slot_table import SlotTable
from tercet.triton_kernels.tuning import choose_matmul_sample, load_table

DEVICE, DTYPE = ("cpu", torch.float32) if INTERPRETED else ("cuda", torch.bfloat16)
SIZES = (1, 7, 8, 17) if INTERPRETED else (1, 2, 7, 8, 16, 17, 64, 65, 100, 180, 255, 256, 1000)
FEW = SIZES[len(SIZES) // 2]
"""Where kernels change how they go about it: among the sizes."""
SPLIT = 512
"""Decode attention in deterministic mode cuts sequences here; each test of lengths goes across it."""
EPS = 1e-6

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def kernels(test: Callable[..., None]) -> Callable[..., None]:
    """For a GPU, and for the interpreter."""
    if not INTERPRETED:
        for mark in gpu:
            test = mark(test)
    return test


@pytest.fixture(autouse=True)
def _rounded_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """In NumPy a product's bits depend on where a row stands. A processor's do not: here a product is rounded once."""

    def dot(self: Any, a: Any, b: Any, acc: Any, *settings: Any) -> TensorHandle:
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(acc.data.dtype)
        return TensorHandle(product + acc.data, acc.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def check_rows(run: Callable[[slice], Tensor], most: int, sizes: tuple[int, ...] = SIZES) -> None:
    """`run(rows)` computes these rows: they keep the bits that they have among all, wherever they stand."""
    whole = run(slice(0, most))
    assert whole.isfinite().all()
    for size in sizes:
        for start in {0, most - size, random.randint(0, most - size)}:
            rows = slice(start, start + size)
            assert torch.equal(run(rows), whole[rows]), (size, start)


def tuned_products() -> list[str]:
    """Of this GPU's table, what deterministic mode uses; elsewhere the heuristic's choices for such sizes."""
    name = gpu_name(torch.device("cuda", 0)) if torch.cuda.is_available() else ""
    tuned = [key.removesuffix(" bfloat16 deterministic") for key in load_table(name) if key.endswith(" deterministic")]
    # (N, K) that no table knows: odd ones, and those of Llama-3.2-1B.
    odd = ["matmul 1000x360", "matmul_add 576x1536", "matmul_silu_and_mul 2560x640"]
    return [*tuned, *odd, "matmul 3072x2048", "matmul_add 2048x8192", "matmul_silu_and_mul 16384x2048"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("product", tuned_products())
def test_products(product: str) -> None:
    op, _, sizes = product.partition(" ")
    N, K = map(int, sizes.split("x"))
    # A size for each bucket of rows, each of which may have a kernel of its own; heads see few rows.
    most, sizes = (1000, SIZES) if N > 50_000 else (8200, (*SIZES, 400, 1500))
    x, w, bias, norm, residual = randn(most, K), randn(N, K) * K**-0.5, randn(N), randn(K), randn(most, N)

    def added(rows: slice) -> Tensor:
        out = residual[rows].clone()
        matmul_add(x[rows], w, out, deterministic=True)
        return out

    def drawn_from(rows: slice) -> Tensor:
        """The logits of the kernel that would draw from them."""
        config = choose_matmul_sample(len(x[rows]), N, K, DTYPE, True, x.device)
        if config.kernel == "apart":
            return matmul(x[rows], w, deterministic=True)
        out = x.new_empty(len(x[rows]), N)
        launch_matmul(config, x[rows], w, out)
        return out

    match op:
        case "matmul":
            check_rows(lambda rows: matmul(x[rows], w, deterministic=True), most, sizes)
            check_rows(lambda rows: matmul(x[rows], w, bias, deterministic=True), most, sizes)
            check_rows(lambda rows: rms_norm_matmul(x[rows], norm, EPS, w, deterministic=True), most, sizes)
        case "matmul_add":
            check_rows(added, most, sizes)
        case "matmul_silu_and_mul":
            check_rows(lambda rows: matmul_silu_and_mul(x[rows], w, deterministic=True), most, sizes)
            gate = partial(rms_norm_matmul_silu_and_mul, eps=EPS, w_2FK=w, deterministic=True)
            check_rows(lambda rows: gate(x[rows], norm), most, sizes)
        case "matmul_sample":
            assert torch.equal(drawn_from(slice(0, most)), matmul(x, w, deterministic=True))
            check_rows(drawn_from, most, sizes)
        case _:
            raise AssertionError(f"{op}: deterministic mode has no test of it")


@kernels
@pytest.mark.parametrize("width", [64, 1000] if INTERPRETED else [64, 576, 1024, 4096, 5120])
def test_norms(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    most = max(SIZES) + 3
    monkeypatch.setattr(norm_module, "_FEW_ROWS", FEW)
    x, residual, weight = randn(most, width), randn(most, width), randn(width)

    def added(rows: slice) -> Tensor:
        total = residual[rows].clone()
        return torch.stack((add_rms_norm(x[rows], total, weight, EPS, deterministic=True), total), 1)

    check_rows(lambda rows: rms_norm(x[rows], weight, EPS, deterministic=True), most)
    check_rows(added, most)


@kernels
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(6, 2, 16)] if INTERPRETED else [(16, 8, 128), (14, 2, 64), (4, 4, 96), (8, 1, 256)]
)
def test_prologue(heads: int, kv_heads: int, dim: int) -> None:
    """Queries and what goes into the cache: the same for a decode row as in the longest chunk."""
    most, page = max(SIZES) + 3, 16
    qkv, norms = randn(most, (heads + 2 * kv_heads) * dim), (randn(dim), randn(dim))
    positions = torch.randint(0, 500, (most,), dtype=torch.int32, device=DEVICE)
    cells = torch.randperm((most // page + 2) * page, device=DEVICE)[:most]
    table = torch.randn(500, dim, device=DEVICE)

    def run(rows: slice) -> Tensor:
        caches = [torch.zeros(most // page + 2, kv_heads, page, dim, device=DEVICE, dtype=DTYPE) for _ in range(2)]
        steps = positions[rows], cells[rows], table, *norms, EPS, *caches, heads
        q = attention_prologue(qkv[rows].clone(), *steps)
        written = (cache[cells[rows] // page, :, cells[rows] % page] for cache in caches)
        return torch.cat((q, *written), 1)

    check_rows(run, most)


@kernels
@pytest.mark.parametrize("width", [96] if INTERPRETED else [1000, 3072])
def test_gate(width: int) -> None:
    most = max(SIZES) + 3
    x = randn(most, 2 * width) * 3
    check_rows(lambda rows: silu_and_mul(x[rows]), most)


@kernels
def test_draws_and_log_probabilities() -> None:
    most, vocab = max(SIZES) + 3, 1100 if INTERPRETED else 50_003
    logits = randn(most, vocab) * 2
    table = random_table(most + 1, 1, 64, vocab, 3)
    table.length_S[:] = 20
    table.temperature_S[:] = torch.rand(most + 1) * 1.5
    table.temperature_S[::4] = 0.0
    table.top_p_S[::2], table.top_k_S[::3] = 0.8, 30
    table = SlotTable(**{field.name: getattr(table, field.name).to(DEVICE) for field in fields(SlotTable)})
    slots = torch.arange(most, dtype=torch.int32, device=DEVICE)

    def run(rows: slice) -> Tensor:
        tokens = sample(logits[rows], slots[rows], torch.full_like(slots[rows], 20), table)
        return torch.cat([tokens[:, None], log_probabilities(logits[rows], tokens, 3)], 1)

    check_rows(run, most)


HEADS = [
    long(Heads(4, 2, 32, 32)),
    Heads(3, 1, 16, 16, window=40, softcap=5.0),
    Heads(2, 1, 16, 16, sinks=True),
    long(Heads(2, 1, 512, 16)),
] if INTERPRETED else [
    Heads(16, 8, 128, 64),
    Heads(32, 8, 128, 16),
    Heads(9, 3, 64, 64),
    Heads(28, 4, 128, 64, window=700),
    Heads(8, 8, 80, 64, alibi=True),
    Heads(8, 8, 128, 64, alibi=True, softcap=20.0),
    Heads(8, 2, 64, 64, softcap=20.0),
    Heads(8, 2, 96, 64),
    Heads(8, 2, 256, 64),
    Heads(8, 2, 256, 64, softcap=20.0),
    Heads(8, 4, 256, 64, window=1024),
    Heads(32, 4, 512, 64),
    Heads(8, 1, 512, 64),
    Heads(16, 2, 64, 64, sinks=True),
    Heads(16, 2, 64, 64, window=128, sinks=True),
]  # fmt: skip
LENGTHS = [1, 31, 64, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT, 2 * SPLIT + 77] + [4500] * (not INTERPRETED)


@kernels
@pytest.mark.parametrize("cells", [None, long(FP8)])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode_rows(heads: Heads, cells: torch.dtype | None) -> None:
    cache = PagedCache(heads, LENGTHS, DEVICE, DTYPE, cells)
    most = 20 if INTERPRETED else 260
    slots = [random.randrange(len(LENGTHS)) for _ in range(most)]
    lengths = [max(1, LENGTHS[slot] - random.choice([0, 0, 1, 20])) for slot in slots]
    q = cache.queries(most)
    whole = cache.decode(q, slots, lengths, deterministic=True)
    assert whole.isfinite().all()
    for size in SIZES:
        if size <= most:
            start = random.randint(0, most - size)
            rows = slice(start, start + size)
            got = cache.decode(q[rows], slots[rows], lengths[rows], deterministic=True)
            assert torch.equal(got, whole[rows]), (size, start)
    order = random.sample(range(most), most)
    got = cache.decode(q[order], [slots[row] for row in order], [lengths[row] for row in order], deterministic=True)
    assert torch.equal(got, whole[order])


@kernels
@pytest.mark.parametrize("cells", [None, long(FP8)])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_chunks_cut_anywhere(heads: Heads, cells: torch.dtype | None) -> None:
    length = 2 * SPLIT + 77 if not INTERPRETED else 150
    cache = PagedCache(heads, [length, 300, 70], DEVICE, DTYPE, cells)
    q = cache.queries(length)
    whole = cache.prefill(q, [(0, 0, length)])
    others = [(1, 100, 130), (2, 69, 1)]
    filler = cache.queries(131)
    for _ in range(2 if INTERPRETED else 12):
        start = 0
        while start < length:
            count = min(length - start, random.choice([1, 2, 7, 16, 63, 64, 65, 128, 255, 500]))
            own = q[start : start + count]
            alone = cache.prefill(own, [(0, start, count)])
            among = cache.prefill(torch.cat((filler, own)), [*others, (0, start, count)])
            assert torch.equal(alone, whole[start : start + count]), (start, count)
            assert torch.equal(among[131:], whole[start : start + count]), (start, count)
            start += count


def test_interpreted() -> None:
    rerun_interpreted(__file__)
