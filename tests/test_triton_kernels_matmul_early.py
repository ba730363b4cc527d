"""Products whose weights come first, on Hopper alone: they compile, refuse what they cannot do, are right on a GPU."""

import re
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tercet.triton_kernels import matmul, matmul_launch, matmul_parts, tuning
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.matmul_launch import can_be_early, launch_matmul

EPS = 1e-5
FEWEST_NUMBERS = 128
CONFIGS = [
    MatmulConfig("early", 8, 16, 32, 4, splits=32, hold=True),
    MatmulConfig("early", 8, 32, 64, 8, splits=8),
    MatmulConfig("early", 8, 32, 32, 8, splits=16, extra=True, hold=True),
    MatmulConfig("early", 16, 64, 32, 8, splits=8, hold=True),
    MatmulConfig("early", 16, 16, 64, 4, splits=8),
    MatmulConfig("early", 16, 16, 32, 4, splits=16, parts=2, hold=True),
]


def name_of(config: MatmulConfig) -> str:
    return f"{config.block_m}x{config.width}x{config.block_k}w{config.num_warps}p{config.parts}{'h' * config.hold}"


def exact(x: Tensor, w: Tensor, bias: Tensor | None, norm: Tensor | None) -> Tensor:
    x = x.double()
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS) * norm.double()
    return x @ w.double().T + (0 if bias is None else bias.double())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_gpu(config: MatmulConfig, dtype: torch.dtype) -> None:
    for M in (1, 2, 3, 5, 8, 11, 16):
        if config.block_m < M:
            continue
        # Of 64 columns all 3,072 numbers are more than fit.
        for tiles, K in ((1, 1024), (65, 1024), (3, 3072 if config.width <= 32 else 1024)):
            size = M, tiles * config.width, K
            for epilogue in ("parts",) if config.parts > 1 else ("store", "add", "gate"):
                check(config, dtype, size, epilogue, biased=False, normed=False)
                if epilogue != "parts":
                    check(config, dtype, size, epilogue, biased=True, normed=False)
                    check(config, dtype, size, epilogue, biased=True, normed=True)


def check(
    config: MatmulConfig, dtype: torch.dtype, size: tuple[int, int, int], epilogue: str, *, biased: bool, normed: bool
) -> None:  # fmt: skip
    """Over so many draws that the bound is one for roundings: those of eight numbers may all be large."""
    M, N, K = size
    count, error, length = 0, 0.0, 0.0
    while count < FEWEST_NUMBERS:
        x, w, bias, norm = (
            tensor.to("cuda", dtype)
            for tensor in (torch.randn(M, K), torch.randn(N, K) * K**-0.5, torch.randn(N), torch.rand(K) + 0.5)
        )
        out, wanted = launched(config, x, w, epilogue, bias if biased else None, norm if normed else None)
        count += out.numel()
        error += float((out.double() - wanted).square().sum())
        length += float(wanted.square().sum())
    near = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}[out.dtype]
    assert (error / length) ** 0.5 < near, (config, size, epilogue, biased, normed)


def launched(
    config: MatmulConfig, x: Tensor, w: Tensor, epilogue: str, bias: Tensor | None, norm: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What came out, and what should have."""
    M, N = x.shape[0], w.shape[0]
    wanted, before = exact(x, w, bias, norm), torch.randn(M, N, device=x.device).to(x.dtype)
    if epilogue == "parts":
        out = x.new_full((config.parts, M, N), float("nan"), dtype=torch.float32)
        cut = zip(x.double().chunk(config.parts, 1), w.double().chunk(config.parts, 1), strict=True)
        wanted = torch.stack([a @ b.T for a, b in cut])
    elif epilogue == "gate":
        out = x.new_full((M, N // 2), float("nan"))
        wanted = F.silu(wanted[:, 0::2]) * wanted[:, 1::2]
    elif epilogue == "add":
        out = before.clone()
        wanted = wanted + before.double()
    else:
        out = x.new_full((M, N), float("nan"))
    launch_matmul(config, x, w, out, epilogue, bias, norm, EPS)
    return out, wanted


@pytest.mark.gpu
def test_rows_have_the_bits_of_their_own() -> None:
    """Whatever is in the rows beside it, and again and again."""
    config = MatmulConfig("early", 8, 16, 32, 8, splits=32, hold=True)
    x, w = (torch.randn(size, 2048, device="cuda").bfloat16() for size in (8, 1024))
    out = x.new_empty(8, 1024)
    launch_matmul(config, x, w, out)
    for M in (1, 3, 8, 8):
        again = x.new_full((M, 1024), float("nan"))
        launch_matmul(config, x[:M], w, again)
        assert torch.equal(again, out[:M])


compiles = pytest.mark.skipif(INTERPRETED, reason="compiles")


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@compiles
@pytest.mark.parametrize(
    ("config", "epilogue", "normed", "dtype"),
    [
        (CONFIGS[0], "store", True, torch.bfloat16),
        (CONFIGS[1], "add", False, torch.float16),
        (CONFIGS[2], "gate", True, torch.bfloat16),
        (CONFIGS[5], "parts", False, torch.bfloat16),
    ],
    ids=str,
)
def test_compile(
    config: MatmulConfig, epilogue: str, normed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One trip to the L2 cache behind the wait, with the weights of HOLD in registers; one kernel for any rows."""
    w, norm = meta(1536, 1024, dtype=dtype), meta(1024, dtype=dtype)
    with compiling_for(90) as kernels:
        for M in (1, 2, 8):
            x = meta(M, 1024, dtype=dtype)
            out = meta(M, 768 if epilogue == "gate" else 1536, dtype=dtype)
            if epilogue == "parts":
                out = meta(config.parts, M, 1536, dtype=torch.float32)
            launch_matmul(config, x, w, out, epilogue, None, norm if normed else None, EPS)
    assert len({kernel.hash for kernel in kernels}) == 1
    ptx = kernels[0].asm["ptx"]
    ahead, behind = ptx.split("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in ahead.split("cp.async.bulk.tensor")[0]
    assert "cp.async.bulk.tensor.3d" in ahead
    assert "cp.async.bulk" not in behind
    assert ("ld.shared" in ahead) == config.hold
    assert behind.count("mma.sync.aligned.m16n8k16") == ptx.count("mma.sync")
    assert behind.index("ld.global") < behind.rindex("ld.global") < behind.index("mma.sync")
    assert "ld.global.v4.b32" in behind
    assert ".local" not in ptx


@compiles
def test_bad_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows no tiles that are not full."""
    monkeypatch.setattr(matmul_launch, "is_hopper", lambda device: True)
    config = MatmulConfig("early", 8, 32, 32, 4, splits=16)
    for M, N, K in ((9, 64, 1024), (8, 48, 1024), (8, 64, 768), (8, 64, 4096)):
        x, w = meta(M, K), meta(N, K)
        assert not can_be_early(config, x, w)
        with pytest.raises(ValueError, match=re.escape(f"got {M} rows, {N} columns and K = {K}")):
            launch_matmul(config, x, w, meta(M, N))
    assert can_be_early(config, meta(8, 1024), meta(64, 1024))
    assert not can_be_early(config, meta(8, 1024, dtype=torch.float32), meta(64, 1024, dtype=torch.float32))


def test_wrappers_do_without_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table may have been made for other sizes, or for another GPU."""
    early, plain = MatmulConfig("early", 8, 16, 32, 4, splits=4, parts=2), MatmulConfig("skinny", 8, 16, 32, 1)
    used = Mock()
    for module in (matmul, matmul_parts):
        monkeypatch.setattr(module, "use_kernels", lambda tensor: True)
        monkeypatch.setattr(module, "launch_matmul", used)
        monkeypatch.setattr(module, "choose_matmul", lambda *args: plain if args[5] else early)
    x, w, norm = torch.randn(4, 256).bfloat16(), torch.randn(48, 256).bfloat16(), torch.randn(256).bfloat16()
    matmul.matmul(x, w)
    matmul.matmul_add(x, w, torch.zeros(4, 48).bfloat16())
    assert [call.args[0] for call in used.call_args_list] == [plain, plain]
    assert matmul.norming_config("rms_norm_matmul", x, norm, w, False) is None
    assert matmul_parts.matmul_parts(x, w) is None
    monkeypatch.setattr(matmul_launch, "is_hopper", lambda device: True)
    early = MatmulConfig("early", 8, 16, 32, 4, splits=4)
    assert matmul.norming_config("rms_norm_matmul", x, norm, w, False) == early
    early = MatmulConfig("early", 8, 16, 32, 4, splits=4, parts=2)
    parts = matmul_parts.matmul_parts(x, w)
    assert parts is not None
    assert parts.shape == (2, 4, 48)


def test_a_draw_reads_its_logits_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    early = MatmulConfig("early", 8, 16, 32, 4, splits=4)
    monkeypatch.setattr(tuning, "choose_matmul", lambda *args: early)
    monkeypatch.setattr(tuning, "gpu_name", lambda device: "")
    chosen = tuning.choose_matmul_sample(4, 48, 256, torch.bfloat16, False, torch.device("cpu"))
    assert chosen.kernel == "apart"
