"""Kernels of vision encoders against float64: patches, learned positions, norms, GELU, turning, attention without a
cache, and an image's rows and positions in the language model.

In bf16 on a GPU, in fp32 and fp16 in Triton's interpreter; the references in fp32. What is to be written begins as NaN.
"""

import re
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from covering import long
from interpreted import rerun_interpreted
from places import PLACES, ROUNDING, Place
from tercet.triton_kernels.axis_turns import axis_turns
from tercet.triton_kernels.clamp_into import clamp_into
from tercet.triton_kernels.cubic_positions import add_cubic_positions
from tercet.triton_kernels.full_attention import full_attention
from tercet.triton_kernels.gelu import KINDS, gelu
from tercet.triton_kernels.grid_positions import add_grid_positions
from tercet.triton_kernels.head_norms import norm_heads
from tercet.triton_kernels.image_patches import image_patches
from tercet.triton_kernels.image_rows import IMAGE_IDS, place_image_rows
from tercet.triton_kernels.layer_norm import add_layer_norm, layer_norm
from tercet.triton_kernels.mean_rows import mean_rows
from tercet.triton_kernels.tile_rows import tile_rows
from tercet.triton_kernels.turn_rows import turn_rows

EPS = 1e-6


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return Place.of(request)


@pytest.fixture(autouse=True)
def nan_memory() -> Iterator[None]:
    """What is allocated and not written is seen."""
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch._C._set_deterministic_algorithms(False)


def places_of(place: Place, rows: int, columns: int) -> Tensor:
    """Of all patches, in no order."""
    pairs = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    return pairs[torch.randperm(len(pairs))].to(place.device, torch.int32)


@pytest.mark.parametrize(("rows", "columns", "side", "frames"), [(2, 3, 14, 2), (1, 1, 16, 2), long(3, 2, 5, 1)])
def test_patches(place: Place, rows: int, columns: int, side: int, frames: int) -> None:
    pixels = torch.randint(0, 256, (rows * side, columns * side, 3), dtype=torch.uint8, device=place.device)
    places, normal = places_of(place, rows, columns), torch.randn(2, 3, device=place.device)
    got = image_patches(pixels, places, normal, side, frames, place.dtype)
    for index, (row, column) in enumerate(places.tolist()):
        square = pixels[row * side : (row + 1) * side, column * side : (column + 1) * side].double()
        wanted = (square * normal[0].double() + normal[1].double()).permute(2, 0, 1)
        place.check_rounded(got[index], wanted[:, None].expand(-1, frames, -1, -1).flatten())


@pytest.mark.parametrize(("rows", "columns", "side"), [(4, 6, 5), (1, 2, 3), (9, 1, 7)])
def test_grid_positions(place: Place, rows: int, columns: int, side: int) -> None:
    table, places = place.random(side * side, 72), places_of(place, rows, columns)
    x = place.random(len(places), 72)
    square = table.double().view(side, side, -1).permute(2, 0, 1)[None]
    size = max(rows, 2), max(columns, 2)  # of one row alone PyTorch would take the middle, not the first
    stretched = F.interpolate(square, size, mode="bilinear", align_corners=True)[0].permute(1, 2, 0)
    wanted = x.double() + stretched[places[:, 0].long(), places[:, 1].long()]
    add_grid_positions(x, table, places, rows, columns)
    place.check_rounded(x, wanted)


@pytest.mark.parametrize(("rows", "columns", "side"), [(4, 6, 5), (1, 2, 3), (9, 1, 7), (3, 3, 3), (2, 5, 1)])
def test_cubic_positions(place: Place, rows: int, columns: int, side: int) -> None:
    table, places = place.random(side * side, 72), places_of(place, rows, columns)
    x = place.random(len(places), 72)
    square = table.double().view(side, side, -1).permute(2, 0, 1)[None]
    size = torch.tensor([rows, columns], device=place.device)
    at = ((places.double() + 0.5) / size * 2 - 1).flip(1)[None, None]  # of the table's edges, -1 to 1
    laid = F.grid_sample(square, at, mode="bicubic", padding_mode="border", align_corners=False)[0, :, 0].t()
    wanted = x.double() + laid
    add_cubic_positions(x, table, places, rows, columns)
    place.check_rounded(x, wanted)


@pytest.mark.parametrize(("tokens", "count", "size"), [(3, 16, 1152), (5, 9, 48), (2, 1, 8), (0, 4, 8)])
def test_mean_rows(place: Place, tokens: int, count: int, size: int) -> None:
    x = place.random(tokens * count, size)
    mean = x.double().view(tokens, count, size).mean(1)
    place.check_rounded(mean_rows(x, count), mean)
    bias, scale = (place.random(size).float() for _ in range(2))
    got = mean_rows(x, count, 3.3, (bias, scale))
    place.check_rounded(got, (3.3 * mean - bias.double()) * scale.double())


@pytest.mark.parametrize(("tokens", "size"), [(3, 1500), (5, 48), (0, 8)])
def test_clamp_into(place: Place, tokens: int, size: int) -> None:
    """Among columns of others, which stay."""
    x, out, bounds = place.random(tokens, size), place.random(tokens, size + 9), place.random(2).float()
    bounds = torch.stack((-bounds[0].abs() - 0.1, bounds[1].abs() + 0.1))
    wanted = out.double()
    wanted[:, 4 : 4 + size] = x.double().clamp(*bounds.double())
    assert clamp_into(x, bounds, out, 4) is out
    place.check_rounded(out, wanted)


@pytest.mark.parametrize(("tokens", "heads", "size"), [(3, 16, 72), (5, 3, 16), (2, 1, 4), (0, 2, 8)])
def test_head_norms(place: Place, tokens: int, heads: int, size: int) -> None:
    qkv, weight = place.random(tokens, 3 * heads * size), place.random(3, size).float()
    each = qkv.double().view(tokens, 3, heads, size)
    wanted = F.rms_norm(each, (size,), eps=1e-3) * weight.double()[:, None]
    norm_heads(qkv, weight, heads, 1e-3)
    place.check_rounded(qkv, wanted.flatten(1))


@pytest.mark.parametrize(("tiles", "side", "size"), [(3, 4, 72), (1, 6, 1024), (2, 1, 8), (0, 2, 8)])
def test_tile_rows(place: Place, tiles: int, side: int, size: int) -> None:
    """Of patches in no order within their tile, tiles one below the other."""
    x, first, table = place.random(tiles * side**2, size), place.random(size), place.random(side**2 + 1, size)
    each = [places_of(place, side, side) for _ in range(tiles)]
    below = [within + place.ints([tile * side, 0]) for tile, within in enumerate(each)]
    got = tile_rows(x, first, table, torch.cat([place.ints([]).view(0, 2), *below]))
    rows = []
    for within, patches in zip(each, x.double().split(side**2), strict=False):
        positions = 1 + within[:, 0].long() * side + within[:, 1].long()
        rows += [(first.double() + table[0].double())[None], patches + table[positions].double()]
    place.check_rounded(got, torch.cat(rows) if rows else x.double())


@pytest.mark.parametrize("shape", [(1, 1280), (5, 48), (3, 4608), (0, 64)], ids=str)
def test_layer_norm(place: Place, shape: tuple[int, int]) -> None:
    x, residual = place.random(*shape) * 3 + 1, place.random(*shape)
    weight, bias = place.random(shape[1]), place.random(shape[1])

    def normed(rows: Tensor) -> Tensor:
        return F.layer_norm(rows.double(), (shape[1],), weight.double(), bias.double(), EPS)

    place.check_rounded(layer_norm(x, weight, bias, EPS), normed(x))
    before = residual.double()
    got = add_layer_norm(x, residual, weight, bias, EPS)
    place.check_rounded(residual, before + x.double())
    place.check_rounded(got, normed(residual))


@pytest.mark.parametrize("kind", KINDS)
def test_gelu(place: Place, kind: str) -> None:
    x = place.random(3, 1000) * 4
    exact = x.double()
    wanted = {
        "exact": F.gelu(exact),
        "tanh": F.gelu(exact, approximate="tanh"),
        "quick": exact * torch.sigmoid(1.702 * exact),
    }[kind]
    assert gelu(x, kind) is x
    place.check_rounded(x, wanted)


@pytest.mark.parametrize(("heads", "dim"), [(3, 16), (2, 72), (16, 80)])
def test_turn_rows(place: Place, heads: int, dim: int) -> None:
    qkv = place.random(5, 3 * heads * dim)
    angles = torch.randn(5, dim // 2, device=place.device).double()
    q, k, v = qkv.double().view(5, 3, heads, dim).unbind(1)
    turned = []
    for x in (q, k):
        pairs = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
        turned.append(torch.cat((pairs.real, pairs.imag), -1))
    turn_rows(qkv, torch.cat((angles.cos(), angles.sin()), 1).float(), heads)
    place.check_rounded(qkv, torch.stack((*turned, v), 1).flatten(1))


@pytest.mark.parametrize(
    ("ends", "heads", "dim"),
    [
        ([65], 2, 72),
        ([16, 20, 52], 1, 80),
        ([4, 37], 3, 16),
        ([3], 2, 12),
        long([130], 1, 64),
        long([33], 1, 128),
        long([31, 64], 1, 120),
    ],
    ids=str,
)
def test_full_attention(place: Place, ends: list[int], heads: int, dim: int) -> None:
    check_full_attention(place, ends, heads, dim)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("ends", "heads", "dim"),
    [
        ([1024], 4, 72),
        ([4096, 4100], 16, 80),
        ([3000], 16, 128),
        ([320], 2, 64),
        ([385], 3, 72),
        ([1, 128, 400, 911, 1040, 1400], 5, 80),
        ([700, 701], 16, 88),
        ([5440], 16, 96),
    ],
    ids=str,
)
def test_full_attention_of_many(dtype: torch.dtype, ends: list[int], heads: int, dim: int) -> None:
    """Segments that end anywhere, of less than a tile, too."""
    check_full_attention(Place("cuda", dtype), ends, heads, dim)


def check_full_attention(place: Place, ends: list[int], heads: int, dim: int) -> None:
    qkv, scale = place.random(ends[-1] + 7, 3 * heads * dim), 1.7 * dim**-0.5
    qkv[ends[-1] :] = float("nan")
    q, k, v = qkv.double().view(-1, 3, heads, dim).permute(1, 2, 0, 3)
    segments = list(zip([0, *ends[:-1]], ends, strict=True))
    longest = max(end - begin for begin, end in segments)
    got = full_attention(qkv, place.ints(ends), longest, heads, scale)
    assert got.dtype == place.dtype
    for begin, end in segments:
        weights = torch.softmax(q[:, begin:end] @ k[:, begin:end].transpose(1, 2) * scale, -1)
        wanted = (weights @ v[:, begin:end]).transpose(0, 1).flatten(1)
        # Weights are rounded before values are multiplied with them.
        torch.testing.assert_close(got[begin:end].double(), wanted, rtol=0, atol=4 * ROUNDING[place.dtype])


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(("positions", "axes"), [(3, [0, 1, 2, 0, 1]), (2, [0, 0, 1, 1])])
def test_axis_turns(place: Place, positions: int, axes: list[int], plain: bool) -> None:
    """`plain`: rows below 0 are those of tokens with one position."""
    table = torch.randn(9, 2 * len(axes), device=place.device)
    rows = torch.randint(-2, 12, (7, positions), dtype=torch.int32)
    others = torch.randint(0, 12, (7,), dtype=torch.int32)
    out = torch.full((7, 2 * len(axes)), float("nan"), device=place.device)
    axis_turns(table, rows.to(place.device), place.ints(axes), out, others.to(place.device) if plain else None)
    if plain:
        rows = torch.where(rows < 0, others[:, None], rows)
    for row, got in zip(rows.clamp(0, 8).tolist(), out, strict=True):
        wanted = [table[row[axis], part * len(axes) + index] for part in (0, 1) for index, axis in enumerate(axes)]
        assert torch.equal(got, torch.stack(wanted))


@pytest.mark.parametrize("add", [False, True])
def test_image_rows(place: Place, add: bool) -> None:
    ids = [5, IMAGE_IDS, IMAGE_IDS - 1, 2**31 - 1, 0]
    stream, rows = place.random(5, 72), place.random(5, 72)
    rows[[0, 2, 4]] = float("nan")
    wanted = stream.double()
    wanted[[1, 3]] = rows[[1, 3]].double() + (wanted[[1, 3]] if add else 0)
    place_image_rows(stream, place.ints(ids), rows, add=add)
    place.check_rounded(stream, wanted)


def bad_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    x, w, ints = torch.randn(4, 8), torch.randn(8), torch.zeros(4, 2, dtype=torch.int32)
    pixels, normal, qkv = torch.zeros(6, 4, 3, dtype=torch.uint8), torch.zeros(2, 3), torch.randn(4, 24)
    ends, table = torch.tensor([4], dtype=torch.int32), torch.zeros(3, 4)
    yield "pixels: got torch.float32", lambda: image_patches(pixels.float(), ints, normal, 2, 2, torch.float32)
    yield "multiples of 4", lambda: image_patches(pixels, ints, normal, 4, 2, torch.float32)
    yield "dtype: got torch.int32", lambda: image_patches(pixels, ints, normal, 2, 2, torch.int32)
    yield "table: got 8 rows, wanted a square", lambda: add_grid_positions(x, torch.zeros(8, 8), ints, 2, 2)
    yield "places: got shape [4], wanted [4, 2]", lambda: add_grid_positions(x, torch.zeros(9, 8), ints[:, 0], 2, 2)
    yield "table: got 7 rows, wanted a square", lambda: add_cubic_positions(x, torch.zeros(7, 8), ints, 2, 2)
    yield "table: got shape [9, 7]", lambda: add_cubic_positions(x, torch.zeros(9, 7), ints, 2, 2)
    yield "bias: got shape [7], wanted [8]", lambda: layer_norm(x, w, w[:7], EPS)
    yield "x: got shape [3, 8], wanted [4, 8]", lambda: add_layer_norm(x[:3], x, w, w, EPS)
    yield "kind: got 'silu', wanted 'exact' or", lambda: gelu(x, "silu")
    yield "x: got strides [1, 8]", lambda: gelu(x.T, "tanh")
    yield "x: got 4 rows, wanted a multiple of 3", lambda: mean_rows(x, 3)
    yield "scale: got shape [7], wanted [8]", lambda: mean_rows(x, 2, 1.0, (w, w[:7]))
    yield "first: got 1, wanted 0 to 0", lambda: clamp_into(x, w[:2], x, 1)
    yield "weight: got shape [2, 8], wanted [3, 8]", lambda: norm_heads(qkv, x[:2], 1, EPS)
    yield "table: got 9 rows, wanted a square and one more", lambda: tile_rows(x, w, torch.zeros(9, 8), ints)
    yield "x: got 4 rows, wanted a multiple of 9", lambda: tile_rows(x, w, torch.zeros(10, 8), ints)
    yield "qkv: got 24 columns, wanted a multiple of 15", lambda: turn_rows(qkv, x, 5)
    yield "cos_sin: got shape [3, 8], wanted [4, 8]", lambda: turn_rows(qkv, x[:3], 1)
    yield "ends: got torch.int64", lambda: full_attention(qkv, ends.long(), 4, 1, 1.0)
    yield "heads of 200 numbers, wanted 128 at most", lambda: full_attention(torch.zeros(4, 600), ends, 4, 1, 1.0)
    yield "axis: got shape [4], wanted [2]", lambda: axis_turns(table, ints, ints[:, 0].contiguous(), x)
    yield "out: got shape [4, 8], wanted [4, 4]", lambda: axis_turns(table, ints, ints[0], x)
    yield "rows: got torch.float16", lambda: place_image_rows(x, ints[:, 0].contiguous(), x.half(), add=True)
    yield "ids: got torch.float32", lambda: place_image_rows(x, torch.zeros(4), x, add=False)


@pytest.mark.parametrize(("message", "call"), list(bad_calls()), ids=lambda value: str(value)[:24])
def test_wrong_arguments_are_refused(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_interpreted() -> None:
    rerun_interpreted(__file__)
