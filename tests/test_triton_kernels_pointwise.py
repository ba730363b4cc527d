"""What surrounds products and attention against float64: embedding, norms, rotary, gate, KV write, and their wrappers.

Each kernel computes in fp32 and rounds once, so its results are the rounded exact ones: in bf16 on a GPU, in fp32 and
fp16 in Triton's interpreter; the references in fp32. Caches begin as NaN.
"""

import re
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from covering import long
from interpreted import rerun_interpreted
from places import PLACES, Place
from tercet.triton_kernels.add_normed import add_normed, add_normed_rms_norm
from tercet.triton_kernels.add_rms_norm import add_rms_norm, rms_norm
from tercet.triton_kernels.attention_prologue import attention_prologue
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.embedding import embedding
from tercet.triton_kernels.gelu_and_mul import gelu_and_mul
from tercet.triton_kernels.qk_norm import qk_norm, qk_squares
from tercet.triton_kernels.residual_add import residual_add
from tercet.triton_kernels.rotary import rotary
from tercet.triton_kernels.scaled_embedding import scaled_embedding
from tercet.triton_kernels.silu_and_mul import silu_and_mul
from tercet.triton_kernels.soft_cap import soft_cap
from tercet.triton_kernels.write_kv import write_kv
from tercet.triton_kernels.xielu import xielu

EPS, PAGE = 1e-6, 64
HAVE_GPU = torch.cuda.is_available()
MANY = 257 if HAVE_GPU else 33
"""The interpreter takes a millisecond for each program."""


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return Place.of(request)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def turned(x_THD: Tensor, positions: list[int], angles_PC: Tensor) -> Tensor:
    """A pair (first half, second half of what turns) is one complex number, turned by its position's angle."""
    half = angles_PC.shape[1]
    x = x_THD.double()
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    angles = angles_PC[positions][:, None, :].to(x.device)
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), -1)


def rotary_angles(num_positions: int, rotary_dim: int, device: str) -> tuple[Tensor, Tensor]:
    """Angles in float64, and the kernels' table of cosines and sines."""
    inverse = 10_000.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    angles_PC = torch.outer(torch.arange(num_positions).double(), inverse)
    return angles_PC, torch.cat((angles_PC.cos(), angles_PC.sin()), 1).float().to(device)


@pytest.mark.parametrize("width", [64, 1000, long(576), long(4096)])
@pytest.mark.parametrize("vocab_start", [0, 700])
def test_embedding(place: Place, width: int, vocab_start: int) -> None:
    table = place.random(1000, width)
    ids = torch.randint(0, 2000, (MANY,), dtype=torch.int32)
    ids[:5] = torch.tensor([vocab_start, vocab_start + 999, vocab_start + 1000, 2**31 - 1, -1])
    got = embedding(ids.to(place.device), table, vocab_start)
    for row, index in enumerate(ids.tolist()):
        wanted = table[index - vocab_start] if 0 <= index - vocab_start < 1000 else torch.zeros_like(table[0])
        assert torch.equal(got[row], wanted)
    place.check_rounded(scaled_embedding(ids.to(place.device), table, vocab_start, 1.7), 1.7 * got.double())


@pytest.mark.parametrize(
    "shape",
    [(1, 1024), (2100 if HAVE_GPU else MANY, 64), (9, 5120), (5, 1000), (MANY // 4, 16, 128), (2, 16384)],
    ids=str,
)
def test_norms(place: Place, shape: tuple[int, ...]) -> None:
    x, residual, weight = place.random(*shape) * 3, place.random(*shape), place.random(shape[-1])
    place.check_rounded(rms_norm(x, weight, EPS), normed(x, weight))
    shifted = 1 + weight.float() / 7  # which 16 bits cannot hold
    place.check_rounded(rms_norm(x, shifted, EPS), normed(x, shifted))
    before = residual.double()
    got = add_rms_norm(x, residual, weight, EPS)
    place.check_rounded(residual, before + x.double())
    place.check_rounded(got, normed(residual, weight))
    if x.ndim == 2:
        before = residual.double()
        assert add_normed(x, residual, weight, EPS) is residual
        place.check_rounded(residual, before + normed(x, weight))
        before, following = residual.double(), place.random(shape[-1])
        got = add_normed_rms_norm(x, residual, shifted, following, EPS)
        place.check_rounded(residual, before + normed(x, shifted))
        place.check_rounded(got, normed(residual, following))
        before, scale = residual.double(), torch.tensor([0.3], device=x.device)
        got = add_normed_rms_norm(x, residual, shifted, following, EPS, scale=scale)
        place.check_rounded(residual, (before + normed(x, shifted)) * scale.double())
        place.check_rounded(got, normed(residual, following))
        before = residual.double()
        add_normed(x, residual, weight, EPS, scale=scale)
        place.check_rounded(residual, (before + normed(x, weight)) * scale.double())


@pytest.mark.parametrize(("rows", "num_q", "num_k"), [(1, 2048, 2048), (5, 640, 128), (0, 64, 64)])
def test_norm_of_all_heads(place: Place, rows: int, num_q: int, num_k: int) -> None:
    """By one rank, and by two with half of the columns each."""
    qkv, weight = place.random(rows, num_q + 2 * num_k) * 3, place.random(num_q + num_k)
    wanted = torch.cat(
        (
            normed(qkv[:, :num_q], weight[:num_q]),
            normed(qkv[:, num_q : num_q + num_k], weight[num_q:]),
            qkv[:, num_q + num_k :].double(),
        ),
        1,
    )
    parts = [num_q // 2, num_q // 2, num_k // 2, num_k // 2, num_k // 2, num_k // 2]
    ranks = [torch.cat(qkv.split(parts, 1)[rank::2], 1) for rank in range(2)]
    weights = [torch.cat(weight.split(parts[:4])[rank::2]) for rank in range(2)]
    squares = torch.stack([qk_squares(part, num_q // 2, num_k // 2) for part in ranks])
    qk_norm(qkv, weight, num_q, EPS)
    place.check_rounded(qkv, wanted)
    for rank, (part, its_weight) in enumerate(zip(ranks, weights, strict=True)):
        qk_norm(part, its_weight, num_q // 2, EPS, squares)
        place.check_rounded(part, torch.cat(wanted.split(parts, 1)[rank::2], 1))


@pytest.mark.parametrize("shape", [(1, 576), (MANY, 1000), (3, 4096), (0, 64)], ids=str)
def test_residual_add(place: Place, shape: tuple[int, int]) -> None:
    x, residual = place.random(*shape) * 3, place.random(*shape)
    wanted = residual.double() + x.double()
    assert residual_add(x, residual) is residual
    place.check_rounded(residual, wanted)


@pytest.mark.parametrize(("rows", "width"), [(1, 3072), (MANY, 1536), (MANY, 1000), (9, 12288)])
def test_gate(place: Place, rows: int, width: int) -> None:
    x = place.random(rows, 2 * width) * 4
    gate, up = x.double().chunk(2, 1)
    wanted = gate / (1 + (-gate).exp()) * up
    place.check_rounded(silu_and_mul(x), wanted)
    place.check_rounded(gelu_and_mul(x), F.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize(("rows", "width"), [(1, 1000), (9, 2048), (0, 64)])
def test_xielu(place: Place, rows: int, width: int) -> None:
    """Numbers near zero too, where an exponential is nearly a line."""
    x, curve = place.random(rows, width) * 3, torch.tensor([0.3, -1.2, 0.4, -1e-3], device=place.device)
    x[:, ::3] *= 1e-3
    (above, below), slope, exact = F.softplus(curve[:2].double()), curve[2].double(), x.double()
    under = (slope + below) * (torch.expm1(exact.clamp(max=float(curve[3]))) - exact)
    place.check_rounded(xielu(x, curve), torch.where(exact > 0, above * exact**2, under) + slope * exact)


@pytest.mark.parametrize(("rows", "width"), [(1, 1000), (9, 4096), (0, 64)])
def test_soft_cap(place: Place, rows: int, width: int) -> None:
    x = place.random(rows, width) * 40
    wanted = torch.tanh(x.double() / 30) * 30
    assert soft_cap(x, 30.0) is x
    place.check_rounded(x, wanted)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim"),
    [(9, 3, 64, 64), (4, 4, 80, 32), long(16, 8, 128, 128), long(8, 2, 256, 256)],
)
def test_rotary(place: Place, heads: int, kv_heads: int, dim: int, rotary_dim: int) -> None:
    positions = torch.randint(0, 3000, (MANY,)).tolist()
    angles, table = rotary_angles(3000, rotary_dim, place.device)
    fused = place.random(MANY, heads + 2 * kv_heads, dim)
    before = fused.clone()
    rotary(fused[:, :heads], fused[:, heads : heads + kv_heads], place.ints(positions), table)
    num_turned = heads + kv_heads
    place.check_rounded(fused[:, :num_turned], turned(before[:, :num_turned], positions, angles))
    assert torch.equal(fused[:, num_turned:], before[:, num_turned:])


def cells_of(place: Place, count: int, num_pages: int) -> list[int]:
    """Distinct cells of a cache; for kernels, which skip them, some outside."""
    cells = torch.randperm(num_pages * PAGE)[:count].tolist()
    if place.device == "cpu" and not INTERPRETED:
        return cells
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
def test_write_kv(place: Place, kv_heads: int, dim: int) -> None:
    num_pages, count = 9, 130
    caches = place.nan_caches(num_pages, kv_heads, PAGE, dim)
    cells, fused = cells_of(place, count, num_pages), place.random(count, 3 * kv_heads, dim)
    k, v = fused[:, kv_heads : 2 * kv_heads], fused[:, 2 * kv_heads :]
    write_kv(k, v, *caches, place.ints(cells, torch.int64))
    check_cache(caches[0], cells, list(k))
    check_cache(caches[1], cells, list(v))


@pytest.mark.parametrize("normed_where", ["nowhere", "ahead", "behind"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim"),
    [
        (7, 1, 80, 80),
        (4, 4, 96, 48),
        (6, 2, 256, 64),
        *([(16, 8, 128, 128), (14, 2, 64, 64), (8, 2, 256, 256), (16, 4, 256, 64)] if HAVE_GPU else []),
    ],
)
@pytest.mark.parametrize("count", [1, 13, long(4), *([523] if HAVE_GPU else [])])
def test_prologue(
    place: Place, count: int, heads: int, kv_heads: int, dim: int, rotary_dim: int, normed_where: str
) -> None:
    """Heads are normed before they turn or, if they turn whole, when they have: whatever that makes of their length."""
    num_pages, behind = 10, normed_where == "behind"
    rotary_dim = dim if behind else rotary_dim
    caches = place.nan_caches(num_pages, kv_heads, PAGE, dim)
    qkv = place.random(count, (heads + 2 * kv_heads) * dim)
    cells, positions = cells_of(place, count, num_pages), torch.randint(0, 900, (count,)).tolist()
    angles, table = rotary_angles(900, rotary_dim, place.device)
    longer = 1.3 if behind else 1.0
    norms = (None, None) if normed_where == "nowhere" else (place.random(dim), 1 + place.random(dim).float() / 7)
    q, k, v = qkv.clone().view(count, -1, dim).split([heads, kv_heads, kv_heads], 1)
    got = attention_prologue(
        qkv, place.ints(positions), place.ints(cells, torch.int64), table * longer, *norms, EPS, *caches, heads,
        behind=behind,
    )  # fmt: skip
    if behind:
        q, k = turned(q, positions, angles) * longer, turned(k, positions, angles) * longer
    if norms[0] is not None and norms[1] is not None:
        q, k = normed(q, norms[0]), normed(k, norms[1])
    if not behind:
        q, k = turned(q, positions, angles), turned(k, positions, angles)
    place.check_rounded(got, q)
    kept = [index for index, cell in enumerate(cells) if 0 <= cell < num_pages * PAGE]
    at = torch.tensor([cells[index] for index in kept], device=place.device)
    place.check_rounded(caches[0][at // PAGE, :, at % PAGE], k[kept])
    assert int(caches[0].isfinite().sum()) == len(kept) * kv_heads * dim
    check_cache(caches[1], cells, list(v))


def bad_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    x, w = torch.randn(4, 8), torch.randn(8)
    caches = torch.zeros(2, 3, PAGE, 8), torch.zeros(2, 3, PAGE, 8)
    heads, ints, table = torch.randn(4, 3, 8), torch.zeros(4, dtype=torch.int32), torch.zeros(9, 8)
    slots, qkv = ints.long(), torch.randn(4, 12 * 8)
    yield "weight: got shape [7], wanted [8]", lambda: rms_norm(x, w[:7], EPS)
    yield "x: got strides [1, 8] for shape [8, 4], wanted contiguous", lambda: rms_norm(x.T, w[:4], EPS)
    yield "x: got torch.float64", lambda: rms_norm(x.double(), w.double(), EPS)
    yield "residual: got shape [3, 8], wanted [4, 8]", lambda: add_rms_norm(x, x[:3], w, EPS)
    yield "residual: got torch.float16, wanted torch.float32", lambda: add_rms_norm(x, x.half(), w, EPS)
    yield "residual: got shape [3, 8], wanted [4, 8]", lambda: residual_add(x, x[:3])
    yield "residual: got shape [3, 8], wanted [4, 8]", lambda: add_normed(x, x[:3], w, EPS)
    yield "weight: got shape [7], wanted [8]", lambda: add_normed_rms_norm(x, x, w, w[:7], EPS)
    yield "qkv: got 8 columns, wanted 9 or more", lambda: qk_squares(x, 5, 4)
    yield "squares: got shape [2, 3, 2], wanted [*, 4, 2]", lambda: qk_norm(x, w[:6], 4, EPS, torch.zeros(2, 3, 2))
    yield "logits: got shape [8], wanted [*, *]", lambda: soft_cap(w, 30.0)
    yield "curve: got torch.float16, wanted torch.float32", lambda: xielu(x, w[:4].half())
    yield "x: got shape [4, 7], wanted [*, an even number]", lambda: silu_and_mul(torch.randn(4, 7))
    yield "x: got shape [4, 7], wanted [*, an even number]", lambda: gelu_and_mul(torch.randn(4, 7))
    yield "x: got strides [16, 2]", lambda: silu_and_mul(torch.randn(4, 16)[:, ::2])
    yield "ids: got torch.float32", lambda: embedding(w, x)
    yield "ids: got shape [2, 2], wanted [*]", lambda: embedding(ints.view(2, 2), x)
    yield "weight: got strides", lambda: embedding(ints, x.T)
    yield "weight: got strides", lambda: scaled_embedding(ints, x.T, 0, 2.0)
    yield "k: got shape [4, 3, 6], wanted [4, *, 8]", lambda: rotary(heads, heads[..., :6], ints, table)
    yield "positions: got shape [3], wanted [4]", lambda: rotary(heads, heads, ints[:3], table)
    yield "q: got strides", lambda: rotary(torch.randn(4, 6, 8)[:, ::2], heads, ints, table)
    yield "cos_sin: got shape [9, 7], wanted", lambda: rotary(heads, heads, ints, torch.zeros(9, 7))
    yield "kv_slots: got torch.int32, wanted torch.int64", lambda: write_kv(heads, heads, *caches, ints)
    yield "k: got shape [4, 2, 8], wanted [*, 3, 8]", lambda: write_kv(heads[:, :2], heads, *caches, slots)
    yield "v: got torch.float16", lambda: write_kv(heads, heads.half(), *caches, slots)
    of = qkv, ints, slots
    yield "qkv: got shape [4, 96]", lambda: attention_prologue(*of, table, None, None, EPS, *caches, 7)
    yield "got one, wanted both or neither", lambda: attention_prologue(*of, table, w, None, EPS, *caches, 6)
    yield "got no norms", lambda: attention_prologue(*of, table, None, None, EPS, *caches, 6, behind=True)
    yield "a part turns", lambda: attention_prologue(*of, table[:, :4].clone(), w, w, EPS, *caches, 6, behind=True)


@pytest.mark.parametrize(("message", "call"), list(bad_calls()), ids=lambda value: str(value)[:24])
def test_wrong_arguments_are_refused(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_interpreted() -> None:
    rerun_interpreted(__file__)
