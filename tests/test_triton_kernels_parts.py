"""Products whose K is divided among programs, and the norm that adds their parts, against float64."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from interpreted import rerun_interpreted
from places import PLACES, Place
from scaled_weights import meant, scaled
from tercet.triton_kernels import matmul, matmul_parts, tuning
from tercet.triton_kernels.add_rms_norm import add_rms_norm
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED, use_kernels
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.matmul_launch import launch_matmul
from tercet.triton_kernels.residual_add import residual_add
from tercet.triton_kernels.sum_parts import sum_parts

EPS = 1e-6
CONFIGS = [
    MatmulConfig("skinny", 16, 16, 32, 1, parts=2),
    MatmulConfig("skinny", 32, 16, 16, 1, parts=3),
    MatmulConfig("wave", 16, 32, 32, 4, parts=2),
    MatmulConfig("wave", 16, 32, 16, 4, extra=True, tall=True, parts=4),
]


@pytest.fixture(params=PLACES)
def draw(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    """Fresh numbers, on the device and in the type of this run."""
    return Place.of(request).random


def exact_parts(x: Tensor, w: Tensor, parts: int) -> Tensor:
    """Each part's sum in float64: [S, M, N]."""
    x, w = x.double().unflatten(1, (parts, -1)), w.double().unflatten(1, (parts, -1))
    return torch.einsum("msk,nsk->smn", x, w)


def nan_parts(config: MatmulConfig, x: Tensor, w: Tensor) -> Tensor:
    return x.new_full((config.parts, x.shape[0], w.shape[0]), float("nan"), dtype=torch.float32)


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.skipif(not INTERPRETED, reason="the kernels, in the interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.kernel}{c.height}x{c.width}s{c.parts}")
def test_kernels(config: MatmulConfig, dtype: torch.dtype) -> None:
    """Numbers of rows and columns that fill no tile; each part alone, so that none may take another's columns."""
    for M, N in ((1, 16), (7, 40), (37, 88)):
        x, w = torch.randn(M, 192).to(dtype), torch.randn(N, 192).to(dtype)
        out = nan_parts(config, x, w)
        launch_matmul(config, x, w, out, "parts")
        for got, wanted in zip(out, exact_parts(x, w, config.parts), strict=True):
            assert distance(got, wanted) < 2e-6, (M, N)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize(("T", "D"), [(1, 64), (5, 1000), (17, 96)])
def test_an_update_in_parts(draw: Callable[..., Tensor], parts: int, T: int, D: int) -> None:
    """The sum is rounded once, stored, and normed as it is stored."""
    before, weight = draw(T, D), draw(D)
    update = torch.randn(parts, T, D, device=before.device)
    wanted = before.double() + update.double().sum(0)
    near = {"rtol": 1.02 * torch.finfo(before.dtype).eps, "atol": 2e-6}
    residual = before.clone()
    assert residual_add(update, residual) is residual
    torch.testing.assert_close(residual.double(), wanted, **near)
    added = before.clone()
    normed = add_rms_norm(update, added, weight, EPS)
    assert torch.equal(added, residual)
    total = added.double()
    wanted = total / (total.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    torch.testing.assert_close(normed.double(), wanted, **near)
    assert normed.dtype == before.dtype


def test_rows_behind_the_last_are_left_alone(draw: Callable[..., Tensor]) -> None:
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("the reference adds them too")
    before, weight = draw(9, 64), draw(64)
    update = torch.full((2, 9, 64), float("nan"), device=before.device)
    update[:, :5] = torch.randn(2, 5, 64)
    added, rows = before.clone(), torch.tensor([5], dtype=torch.int32, device=before.device)
    normed = add_rms_norm(update, added, weight, EPS, rows)
    assert torch.equal(added[5:], before[5:])
    assert torch.isfinite(normed[:5]).all()
    assert torch.equal(added[:5], residual_add(update[:, :5].contiguous(), before[:5].clone()))


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize(("M", "N"), [(1, 64), (5, 1000), (17, 96)])
def test_the_sum_of_parts(draw: Callable[..., Tensor], parts: int, M: int, N: int) -> None:
    bias = draw(N)
    given = torch.randn(parts, M, N, device=bias.device)
    for added in (None, bias):
        out = bias.new_full((M, N), float("nan"))
        sum_parts(given, out, added)
        wanted = given.double().sum(0) + (0.0 if added is None else added.double())
        torch.testing.assert_close(out.double(), wanted, rtol=1.02 * torch.finfo(out.dtype).eps, atol=2e-6)


def test_products_with_scaled_weights_are_the_sums_of_their_parts(
    draw: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that is chosen: not in deterministic mode."""
    x = draw(20, 128).half()
    w = scaled(48, 128, 1, x.dtype, str(x.device))
    bias, used = draw(48).half(), Mock(side_effect=launch_matmul)
    monkeypatch.setattr(matmul, "launch_matmul", used)
    whole = MatmulConfig("skinny", 32, 16, 64, 1)
    parted = replace(whole, parts=2)
    monkeypatch.setattr(
        matmul, "choose_scaled", lambda x, w, us_of_adding=math.inf, **_: parted if us_of_adding < math.inf else whole
    )
    for deterministic in (False, True):
        got = matmul.matmul(x, w, bias, deterministic=deterministic)
        assert distance(got, x.double() @ meant(w).double().T + bias.double()) < 2e-3
    assert [call.args[0] for call in used.call_args_list] == [parted, whole][: 2 * use_kernels(x)]


def bad_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    x, w = torch.randn(4, 8), torch.randn(8)
    yield "residual: got shape [3, 8], wanted [4, 8]", lambda: add_rms_norm(x[None], x[:3], w, EPS)
    yield "x: got torch.float16, wanted torch.float32", lambda: add_rms_norm(x[None].half(), x.half(), w.half(), EPS)
    yield "x: got shape [0, 4, 8], wanted one part or more", lambda: residual_add(torch.empty(0, 4, 8), x)
    yield "x: got strides", lambda: residual_add(torch.randn(2, 4, 16)[..., ::2], x)
    yield "residual: got torch.int32", lambda: residual_add(x[None], x.int())
    yield "w: got shape [6, 9], wanted [*, 8]", lambda: matmul_parts.matmul_parts(x, torch.randn(6, 9))
    yield "w: got torch.float16, wanted torch.float32", lambda: matmul_parts.matmul_parts(x, x.half())
    yield "out: got shape [8], wanted [*, *]", lambda: sum_parts(x[None], w)
    yield "parts: got shape [2, 4, 8], wanted [*, 3, 8]", lambda: sum_parts(torch.randn(2, 4, 8), x[:3])
    yield "parts: got torch.float16, wanted torch.float32", lambda: sum_parts(x[None].half(), x)
    yield "bias: got shape [8], wanted [4]", lambda: sum_parts(torch.randn(1, 4, 4), x[:, :4].contiguous(), w)
    yield "x: got shape [8], wanted [*, *]", lambda: matmul_parts.matmul_parts(w, x)


@pytest.mark.parametrize(("message", "call"), list(bad_calls()), ids=lambda value: str(value)[:24])
def test_bad_input(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_the_table_says_when(draw: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = draw(20, 96), draw(48, 96)
    line = tuning.table_key("matmul_add", 48, 96, x.dtype, False)

    def chosen(config: MatmulConfig, rows: int = 20) -> Tensor | None:
        monkeypatch.setattr(tuning, "gpu_name", lambda device: str(config))
        monkeypatch.setattr(tuning, "load_table", {str(config): {line: {64: config}}}.__getitem__)
        return matmul_parts.matmul_parts(x[:rows], w)

    got = chosen(MatmulConfig("skinny", 32, 16, 16, 1, parts=3))
    assert got is not None
    assert got.dtype == torch.float32
    assert distance(got, exact_parts(x, w, 3)) < 2e-6
    assert chosen(MatmulConfig("skinny", 32, 16, 16, 1, parts=3), rows=0) is None
    assert chosen(MatmulConfig("skinny", 32, 16, 64, 1, parts=3)) is None  # parts of K that no blocks fill
    assert chosen(MatmulConfig("tile", 32, 16, 16, 1, parts=3)) is None
    assert chosen(MatmulConfig("skinny", 32, 16, 16, 1)) is None


def test_whole_products_leave_parts_out(draw: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the tiles of deterministic mode, which are meant to be whole; and any tiles do."""
    x, w, residual = draw(20, 96), draw(48, 96), draw(20, 48)
    parted = MatmulConfig("skinny", 32, 16, 16, 1, parts=3)
    for whole in (MatmulConfig("skinny", 32, 32, 32, 1), parted):
        used = Mock(side_effect=launch_matmul)
        monkeypatch.setattr(matmul, "choose_matmul", lambda *args, whole=whole: whole if args[5] else parted)
        monkeypatch.setattr(matmul, "launch_matmul", used)
        added = residual.clone()
        matmul.matmul_add(x, w, added)
        wanted = residual.double() + x.double() @ w.double().T
        assert distance(added, wanted) < torch.finfo(x.dtype).eps * 2 + 1e-6
        assert [call.args[0] for call in used.call_args_list] == [whole] * use_kernels(x)


def test_interpreted() -> None:
    rerun_interpreted(__file__)


# Of Qwen3-8B and 0.6B: o and down.
GPU_SHAPES = [(4096, 4096), (4096, 12288), (1024, 2048), (1024, 3072)]
GPU_CONFIGS = [
    MatmulConfig("skinny", 64, 64, 128, 4, 4, parts=4, prefetch=256),
    MatmulConfig("skinny", 32, 128, 128, 4, 4, parts=2),
    MatmulConfig("wave", 64, 128, 128, 4, 4, parts=2, prefetch=4096),
    MatmulConfig("wave", 128, 128, 64, 8, 4, extra=True, tall=True, parts=2),
]


@pytest.mark.gpu
@pytest.mark.parametrize("config", GPU_CONFIGS, ids=lambda c: f"{c.kernel}{c.height}x{c.width}s{c.parts}")
@pytest.mark.parametrize(("N", "K"), GPU_SHAPES)
def test_gpu(config: MatmulConfig, N: int, K: int) -> None:
    """Also with rows that are there for the graph's sake: what is behind the last is nobody's."""
    w = torch.randn(N, K, device="cuda").bfloat16()
    for M in (17, 64, 200, 256):
        x = torch.randn(M, K, device="cuda").bfloat16()
        wanted = exact_parts(x, w, config.parts)
        for count in (M, M // 2):
            out, rows = nan_parts(config, x, w), torch.tensor([count], dtype=torch.int32, device="cuda")
            launch_matmul(config, x, w, out, "parts", rows=rows)
            for got, part in zip(out, wanted, strict=True):
                assert distance(got[:count], part[:count]) < 1e-5, (M, count)


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_compile(capability: int) -> None:
    x, w = (torch.empty(size, 2048, dtype=torch.bfloat16, device="meta") for size in (200, 1024))
    older = [MatmulConfig("skinny", 32, 64, 64, 4, 3, parts=2)]
    for config in GPU_CONFIGS if capability == 90 else older:
        out = torch.empty(config.parts, 200, 1024, device="meta")
        with compiling_for(capability) as kernels:
            launch_matmul(config, x, w, out, "parts", rows=x[0].int())
        (kernel,) = kernels
        if capability == 90:
            waits, lets = (kernel.asm["ptx"].find(f"griddepcontrol.{word}") for word in ("wait", "launch_dependents"))
            assert 0 < lets < waits, config
