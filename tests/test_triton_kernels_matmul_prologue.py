"""The product that ends in attention's prologue, on Hopper alone: it compiles, refuses what it cannot do, and is right
on a GPU: against float64, and against the two kernels whose place it takes."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from covering import long
from tercet.triton_kernels import matmul_prologue as module
from tercet.triton_kernels.attention_prologue import attention_prologue
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.matmul import matmul
from tercet.triton_kernels.matmul_prologue import (
    can_fuse_prologue,
    matmul_prologue,
    matmul_prologue_reference,
)

D, PAGE, P, EPS = 128, 64, 3000, 1e-6
NEAR = {torch.float16: 1e-3, torch.bfloat16: 6e-3, FP8: 3e-2}


class Case:
    """Random numbers for one call, and where its K and V go: a few tokens nowhere, one beyond the cache."""

    def __init__(
        self, num_tokens: int, heads: int, kv_heads: int, K: int, normed: bool, dtype: torch.dtype, device: str,
        cached: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.cached = cached or dtype

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(dtype)

        self.shape = num_tokens, heads, D
        self.x, self.w = draw(num_tokens, K), draw((heads + 2 * kv_heads) * D, K) * K**-0.5
        self.positions = torch.randint(0, P, (num_tokens,), dtype=torch.int32, device=device)
        angles = torch.outer(torch.arange(P), 10_000.0 ** (-torch.arange(0, D, 2) / D))
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), 1).float().to(device)
        self.norms = (draw(D), draw(D)) if normed else (None, None)
        self.num_pages, self.kv_heads = num_tokens // PAGE + 2, kv_heads
        self.cells = torch.randperm(self.num_pages * PAGE, device=device)[:num_tokens]
        self.cells[::97] = -1
        self.cells[-1] = self.num_pages * PAGE

    def caches(self) -> tuple[Tensor, Tensor]:
        shape = self.num_pages, self.kv_heads, PAGE, D
        k_cache, v_cache = (self.x.new_full(shape, float("nan")).to(self.cached) for _ in range(2))
        return k_cache, v_cache

    def fused(self, rows: Tensor | None = None, first_row: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        q, caches = self.x.new_full(self.shape, float("nan")), self.caches()
        places = self.positions, self.cells, self.cos_sin
        matmul_prologue(self.x, self.w, *places, *self.norms, EPS, *caches, q, rows, first_row)
        return q, *caches

    def apart(self) -> tuple[Tensor, Tensor, Tensor]:
        caches = self.caches()
        places = self.positions, self.cells, self.cos_sin
        q = attention_prologue(matmul(self.x, self.w), *places, *self.norms, EPS, *caches, self.shape[1])
        return q, *caches

    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all tokens in float64."""
        heads = (self.x.double() @ self.w.double().T).view(self.shape[0], -1, D)
        q, k, v = heads.split([self.shape[1], self.kv_heads, self.kv_heads], 1)
        return self._turned(q, self.norms[0]), self._turned(k, self.norms[1]), v

    def _turned(self, x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is not None:
            x = x / (x.square().mean(2, keepdim=True) + EPS).sqrt() * norm.double()
        # A pair (first half, second half) is one complex number, turned by its angle.
        cos, sin = self.cos_sin[self.positions.long()].double().chunk(2, 1)
        turned = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * torch.complex(cos, sin)[:, None]
        return torch.cat((turned.real, turned.imag), 2)


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def at_cells(cache: Tensor, cells: Tensor) -> Tensor:
    return cache[cells // PAGE, :, cells % PAGE]


@pytest.mark.gpu
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "cached"), [(torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, FP8), (torch.float16, FP8)]
)
@pytest.mark.parametrize(("heads", "kv_heads", "K"), [(16, 8, 1024), (7, 1, 520), (5, 5, 256)])
def test_gpu(
    heads: int, kv_heads: int, K: int, dtype: torch.dtype, cached: torch.dtype | None, normed: bool
) -> None:  # fmt: skip
    for num_tokens in (1, 2, 64, 255, 257, random.randint(300, 2000), 5003):
        case = Case(num_tokens, heads, kv_heads, K, normed, dtype, "cuda", cached)
        q, k_cache, v_cache = case.fused()
        wanted_q, wanted_k, wanted_v = case.exact()
        assert distance(q, wanted_q) < NEAR[dtype]
        kept = (case.cells >= 0) & (case.cells < case.num_pages * PAGE)
        for cache, wanted in ((k_cache, wanted_k), (v_cache, wanted_v)):
            # Nothing else was written.
            assert int(cache.float().isfinite().sum()) == int(kept.sum()) * kv_heads * D
            if kept.any():
                assert distance(at_cells(cache, case.cells[kept]), wanted[kept]) < NEAR[cached or dtype]
        # As apart, but rounded once: values have the same bits, queries are nearer to what is right.
        apart_q, _, apart_v = case.apart()
        assert torch.equal(v_cache.float().nan_to_num(7.0), apart_v.float().nan_to_num(7.0))
        if num_tokens > 64:
            assert distance(q, wanted_q) < 0.95 * distance(apart_q, wanted_q)


@pytest.mark.gpu
def test_padding() -> None:
    """Rows behind those there are in truth write no cell and change no bit of the others; `first` are ahead of all."""
    num_tokens, first = 3000, 37
    for count in (0, 1, 256, random.randint(1, num_tokens), num_tokens):
        case = Case(num_tokens, 16, 8, 1024, True, torch.bfloat16, "cuda")
        wanted = case.fused()
        case.x[count:] = float("nan")
        q, *caches = case.fused(torch.tensor([first + count], dtype=torch.int32, device="cuda"), first)
        assert torch.equal(q[:count], wanted[0][:count])
        within = case.cells[:count]
        within = within[(within >= 0) & (within < case.num_pages * PAGE)]
        for cache, whole in zip(caches, wanted[1:], strict=True):
            assert int(cache.isfinite().sum()) == len(within) * 8 * D
            assert torch.equal(at_cells(cache, within), at_cells(whole, within))


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(("normed", "cached"), [(False, None), long(True, None), (True, FP8)])
def test_compile(normed: bool, cached: torch.dtype | None) -> None:
    case = Case(300, 14, 2, 512, normed, torch.bfloat16, "cpu", cached)
    with compiling_for(90) as kernels:
        case.fused()
        case.fused(torch.tensor([300], dtype=torch.int32), 5)
    assert len(kernels) == 2
    for kernel in kernels:
        assert all(word in kernel.asm["ptx"] for word in ("wgmma", "setmaxnreg", "griddepcontrol.wait"))


def test_where_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper, for many tokens, heads of 128 that turn whole, and 16 bits."""
    w, cache = torch.empty(512, 256, dtype=torch.bfloat16), torch.empty(3, 1, PAGE, D, dtype=torch.bfloat16)
    assert not can_fuse_prologue(8192, w, cache, D)
    for name in ("is_hopper", "can_use_tma"):
        monkeypatch.setattr(module, name, lambda tensor: True)
    monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    assert can_fuse_prologue(8192, w, cache, D)
    assert not can_fuse_prologue(4096, w, cache, D)  # half of the multiprocessors
    assert not can_fuse_prologue(0, w, cache, D)  # nothing but decode rows, which have better products
    assert not can_fuse_prologue(8192, w.float(), cache, D)
    assert not can_fuse_prologue(8192, w, cache, D // 2)
    assert not can_fuse_prologue(8192, w, cache[..., :64], 64)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda case: setattr(case, "x", case.x.float()), "x: got torch.float32"),
        (lambda case: setattr(case, "x", case.x[:-1]), "x: got"),
        (lambda case: setattr(case, "x", case.x.T.contiguous().T), "x: got"),
        (lambda case: setattr(case, "w", case.w[:-1]), "w: got"),
        (lambda case: setattr(case, "w", case.w.half()), "w: got"),
        (lambda case: setattr(case, "cos_sin", case.cos_sin[:, :64]), "cos_sin: got"),
        (lambda case: setattr(case, "positions", case.positions[:-1]), "positions: got"),
        (lambda case: setattr(case, "cells", case.cells.int()), "kv_slots: got"),
        (lambda case: setattr(case, "norms", (case.x[0, :D], None)), "got one, wanted both or neither"),
        (lambda case: setattr(case, "norms", (case.x[0, :D], case.x[0, :64])), "k_norm_weight: got"),
        (lambda case: setattr(case, "positions", case.positions.to("meta")), "positions: got"),
        (lambda case: setattr(case, "shape", (9, 4, 64)), "q: got"),
    ],
)
def test_bad_input(change: Callable[[Case], None], match: str) -> None:
    case = Case(9, 4, 2, 256, True, torch.bfloat16, "cpu")
    change(case)
    with pytest.raises(ValueError, match=match):
        case.fused()


def test_reference() -> None:
    """In float32 the reference has float64's numbers. It writes wherever it is told to: every token has a cell."""
    case = Case(33, 6, 2, 64, True, torch.float32, "cpu")
    case.cells = torch.randperm(case.num_pages * PAGE)[: case.shape[0]]
    q, caches = torch.empty(case.shape), case.caches()
    matmul_prologue_reference(case.x, case.w, case.positions, case.cells, case.cos_sin, *case.norms, EPS, *caches, q)
    wanted_q, wanted_k, wanted_v = case.exact()
    assert distance(q, wanted_q) < 1e-5
    for cache, wanted in zip(caches, (wanted_k, wanted_v), strict=True):
        assert distance(at_cells(cache, case.cells), wanted) < 1e-5
        assert int(cache.isfinite().sum()) == wanted.numel()
