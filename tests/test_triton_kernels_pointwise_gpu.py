"""On a GPU: what surrounds products and attention, in bf16 against float64: embedding, norms, rotary, gate, KV write.

Each kernel computes in fp32 and rounds once, so its results are the rounded exact ones. Outputs begin as NaN wherever
the caller hands them in.
"""

import pytest
import torch
from torch import Tensor

from tercet.triton_kernels.add_rms_norm import add_rms_norm, rms_norm
from tercet.triton_kernels.attention_prologue import attention_prologue
from tercet.triton_kernels.embedding import embedding
from tercet.triton_kernels.rotary import rotary
from tercet.triton_kernels.silu_and_mul import silu_and_mul, silu_and_mul_interleaved
from tercet.triton_kernels.write_kv import write_kv

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE, DTYPE = "cuda", torch.bfloat16
EPS, PAGE = 1e-6, 64


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def ints(numbers: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=DEVICE)


def check_rounded(got: Tensor, wanted: Tensor) -> None:
    """`got` is the float64 `wanted`, rounded once."""
    assert got.dtype == DTYPE
    torch.testing.assert_close(got.double(), wanted, rtol=1.02 * 2**-8, atol=1e-5)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def turned(x_THD: Tensor, positions: list[int], angles_PC: Tensor) -> Tensor:
    """A pair (first half, second half of what turns) is one complex number, turned by its position's angle."""
    half = angles_PC.shape[1]
    x = x_THD.double()
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    angles = angles_PC[positions][:, None, :].to(DEVICE)
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), -1)


def rotary_angles(num_positions: int, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """Angles in float64, and the kernels' table of cosines and sines."""
    inverse = 10_000.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    angles_PC = torch.outer(torch.arange(num_positions).double(), inverse)
    return angles_PC, torch.cat((angles_PC.cos(), angles_PC.sin()), 1).float().to(DEVICE)


@pytest.mark.parametrize("width", [64, 576, 1000, 4096])
@pytest.mark.parametrize("vocab_start", [0, 700])
def test_embedding(width: int, vocab_start: int) -> None:
    table = random(1000, width)
    ids = torch.randint(0, 2000, (257,), dtype=torch.int32)
    ids[:5] = torch.tensor([vocab_start, vocab_start + 999, vocab_start + 1000, 2**31 - 1, -1])
    got = embedding(ids.to(DEVICE), table, vocab_start)
    for row, index in enumerate(ids.tolist()):
        wanted = table[index - vocab_start] if 0 <= index - vocab_start < 1000 else torch.zeros_like(table[0])
        assert torch.equal(got[row], wanted)


@pytest.mark.parametrize("shape", [(1, 1024), (257, 64), (33, 5120), (5, 1000), (64, 16, 128), (2, 16384)], ids=str)
def test_norms(shape: tuple[int, ...]) -> None:
    x, residual, weight = random(*shape) * 3, random(*shape), random(shape[-1])
    check_rounded(rms_norm(x, weight, EPS), normed(x, weight))
    before = residual.double()
    got = add_rms_norm(x, residual, weight, EPS)
    check_rounded(residual, before + x.double())
    check_rounded(got, normed(residual, weight))


@pytest.mark.parametrize(("rows", "width"), [(1, 3072), (65, 1536), (257, 1000), (9, 12288)])
def test_gate(rows: int, width: int) -> None:
    x = random(rows, 2 * width) * 4
    for got, (gate, up) in (
        (silu_and_mul(x), x.double().chunk(2, 1)),
        (silu_and_mul_interleaved(x), (x.double()[:, 0::2], x.double()[:, 1::2])),
    ):
        check_rounded(got, gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim"), [(16, 8, 128, 128), (9, 3, 64, 64), (4, 4, 80, 32), (8, 2, 256, 256)]
)
def test_rotary(heads: int, kv_heads: int, dim: int, rotary_dim: int) -> None:
    positions = torch.randint(0, 3000, (67,)).tolist()
    angles, table = rotary_angles(3000, rotary_dim)
    fused = random(67, heads + 2 * kv_heads, dim)
    before = fused.clone()
    rotary(fused[:, :heads], fused[:, heads : heads + kv_heads], ints(positions), table)
    num_turned = heads + kv_heads
    check_rounded(fused[:, :num_turned], turned(before[:, :num_turned], positions, angles))
    assert torch.equal(fused[:, num_turned:], before[:, num_turned:])


def places(count: int, num_pages: int) -> list[int]:
    """Distinct cells of a cache, some tokens without one."""
    cells = torch.randperm(num_pages * PAGE)[:count].tolist()
    return [cell if index % 7 != 3 else (-1, num_pages * PAGE)[index % 2] for index, cell in enumerate(cells)]


def check_cache(cache: Tensor, cells: list[int], rows: list[Tensor]) -> None:
    """These cells hold these heads, [kv head, D], to the bit, and no other cell was written."""
    written = 0
    for cell, row in zip(cells, rows, strict=True):
        if 0 <= cell < cache.shape[0] * PAGE:
            assert torch.equal(cache[cell // PAGE, :, cell % PAGE], row)
            written += row.numel()
    assert int(cache.isfinite().sum()) == written


@pytest.mark.parametrize(("kv_heads", "dim"), [(8, 128), (3, 64), (1, 80), (2, 256)])
def test_write_kv(kv_heads: int, dim: int) -> None:
    num_pages, count = 9, 130
    caches = [torch.full((num_pages, kv_heads, PAGE, dim), float("nan"), device=DEVICE, dtype=DTYPE) for _ in range(2)]
    cells, fused = places(count, num_pages), random(count, 3 * kv_heads, dim)
    k, v = fused[:, kv_heads : 2 * kv_heads], fused[:, 2 * kv_heads :]
    write_kv(k, v, *caches, ints(cells, torch.int64))
    check_cache(caches[0], cells, list(k))
    check_cache(caches[1], cells, list(v))


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim"),
    [(16, 8, 128, 128), (14, 2, 64, 64), (7, 1, 80, 80), (4, 4, 96, 48), (8, 2, 256, 256)],
)
@pytest.mark.parametrize("count", [1, 65, 523])
def test_prologue(count: int, heads: int, kv_heads: int, dim: int, rotary_dim: int, with_norms: bool) -> None:
    num_pages = 10
    caches = [torch.full((num_pages, kv_heads, PAGE, dim), float("nan"), device=DEVICE, dtype=DTYPE) for _ in range(2)]
    qkv = random(count, (heads + 2 * kv_heads) * dim)
    cells, positions = places(count, num_pages), torch.randint(0, 900, (count,)).tolist()
    angles, table = rotary_angles(900, rotary_dim)
    norms = (random(dim), random(dim)) if with_norms else (None, None)
    q, k, v = qkv.clone().view(count, -1, dim).split([heads, kv_heads, kv_heads], 1)
    got = attention_prologue(qkv, ints(positions), ints(cells, torch.int64), table, *norms, EPS, *caches, heads)
    if norms[0] is not None and norms[1] is not None:
        q, k = normed(q, norms[0]), normed(k, norms[1])
    check_rounded(got, turned(q, positions, angles))
    keys = turned(k, positions, angles)
    kept = [index for index, cell in enumerate(cells) if 0 <= cell < num_pages * PAGE]
    at = torch.tensor([cells[index] for index in kept], device=DEVICE)
    check_rounded(caches[0][at // PAGE, :, at % PAGE], keys[kept])
    assert int(caches[0].isfinite().sum()) == len(kept) * kv_heads * dim
    check_cache(caches[1], cells, list(v))
