"""The kernels compile for GPUs that are not here: products of the tuned tables, and samples for older cards.

Of each kind of product one size stands for all; what is marked `long` compiles every size.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from covering import covering, few_of, kinds_and_sizes, long
from tercet.triton_kernels import (
    add_normed,
    add_rms_norm,
    embedding,
    gelu_and_mul,
    matmul,
    qk_norm,
    rotary,
    scaled_embedding,
    silu_and_mul,
    soft_cap,
    tuning,
    xielu,
)
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED, Gpu, pretending, shared_bytes
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.matmul_launch import can_divide, fits_early, launch_matmul
from tercet.triton_kernels.tuning import load_table
from tercet.triton_kernels.untuned import heuristic

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")
TABLES = sorted(Path(tuning.__file__).parent.glob("tuned/*.json"))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def check(kernel: CompiledKernel, capability: int) -> None:
    assert kernel.asm["cubin"]
    assert f".target sm_{capability}{'a' if capability == 90 else ''}\n" in kernel.asm["ptx"]


def kind_of(op: str, config: MatmulConfig) -> tuple[object, ...]:
    """What makes it other code; sizes are constants in the same code, but for what multiplies tiles of 64 rows."""
    flags = config.hold, config.extra, config.tall, config.parts > 1, config.splits > 1, config.prefetch > 0
    return config.kernel, *epilogue_of(op, config), config.block_m >= 64, *flags


def epilogue_of(op: str, config: MatmulConfig) -> tuple[str, bool]:
    """And whether the kernel norms its rows itself."""
    epilogue = {"matmul": "store", "matmul_add": "add", "matmul_silu_and_mul": "gate"}[op.removeprefix("rms_norm_")]
    return epilogue, op.startswith("rms_norm_") and config.kernel in ("vector", "split", "early")


def compile_product(
    config: MatmulConfig, op: str, N: int, K: int, capability: int, dtype: torch.dtype = torch.bfloat16
) -> None:
    rows = {"vector": 1, "early": config.block_m}.get(config.kernel, 4 * config.block_m)
    epilogue, normed = epilogue_of(op, config)
    x, w = meta(rows, K, dtype=dtype), meta(N, K, dtype=dtype)
    out = meta(rows, N // 2 if epilogue == "gate" else N, dtype=dtype)
    # A program that has all its weights at once may have room for those of a part only: nothing asks it for the whole.
    whole = config.kernel != "early" or fits_early(config, rows, N, K, 1)
    with compiling_for(capability) as kernels:
        counted = meta(1, dtype=torch.int32)
        if whole:
            launch_matmul(config, x, w, out, epilogue, None, x[0] if normed else None, 1e-6, counted)
        if config.parts > 1:
            launch_matmul(config, x, w, meta(config.parts, rows, N, dtype=torch.float32), "parts", rows=counted)
    assert len(kernels) == whole + (config.parts > 1) > 0
    for kernel in kernels:
        check(kernel, capability)
        if capability == 90:
            waits, lets = (kernel.asm["ptx"].find(f"griddepcontrol.{word}") for word in ("wait", "launch_dependents"))
            assert 0 < lets < waits, config
        if config.kernel == "hopper":
            assert "wgmma" in kernel.asm["ptx"]
            assert "setmaxnreg" in kernel.asm["ptx"]


@kinds_and_sizes
@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_tuned_products(table: Path, every_size: bool) -> None:
    """In both modes: each configuration once for each epilogue, or so few that what makes kinds meets in pairs."""
    rows = load_table(table.stem.replace("_", " "))
    assert rows.keys() == json.loads(table.read_text())["matmul"].keys()
    products: dict[tuple[object, ...], tuple[MatmulConfig, str, int, int]] = {}
    for key, buckets in rows.items():
        found = re.fullmatch(r"(\w+) (\d+)x(\d+) bfloat16 (default|deterministic)", key)
        assert found, key
        op, N, K, mode = found[1], int(found[2]), int(found[3]), found[4]
        for bucket, config in buckets.items():
            assert bucket in tuning.ROW_BUCKETS
            assert mode == "default" or config.kernel in tuning.PLAIN_ORDER
            assert mode == "default" or config.parts == 1
            assert config.parts == 1 or (op in ("matmul", "matmul_add") and can_divide(config, K))
            assert config.kernel != "vector" or bucket == 1
            # What ends in a draw has a file of its own.
            if config.kernel == "apart" or op == "matmul_sample":
                continue
            one = (epilogue_of(op, config), config) if every_size else (*kind_of(op, config), mode)
            products.setdefault(one, (config, op, N, K))
    assert len(products) > (200 if every_size else 60)
    for one in products if every_size else few_of(products, 2):
        compile_product(*products[one], 90)


def test_tiles_of_192_rows() -> None:
    """All four parts of such a tile are multiplied by the units for whole warp groups."""
    x, w = meta(192, 512), meta(384, 512)
    for epilogue, columns in (("store", 384), ("add", 384), ("gate", 192)):
        with compiling_for(90) as kernels:
            config = MatmulConfig("wave", 128, 128, 64, 8, 4, extra=True, tall=True)
            launch_matmul(config, x, w, meta(192, columns), epilogue)
        (kernel,) = kernels
        check(kernel, 90)
        assert kernel.asm["ttgir"].count("ttng.warp_group_dot ") == 4
        assert "mma.sync" not in kernel.asm["ptx"]


@covering(1, capability=[80, 89], deterministic=[False, True])
def test_heuristic_products(capability: int, deterministic: bool) -> None:
    for bucket, dtype, op, K in (
        (1, torch.bfloat16, "rms_norm_matmul", 3072),
        (8, torch.bfloat16, "matmul_add", 1024),
        (64, torch.float16, "matmul_silu_and_mul", 576),
        (256, torch.bfloat16, "matmul", 1024),
        (1024, torch.bfloat16, "matmul", 1024),
        (8192, torch.float32, "matmul", 1000),
    ):
        compile_product(heuristic(op, bucket, 1536, K, dtype, deterministic), op, 1536, K, capability, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, long(torch.bfloat16)])
@pytest.mark.parametrize("deterministic", [False, long(True)])
@kinds_and_sizes
def test_small_cards_have_room(dtype: torch.dtype, deterministic: bool, every_size: bool) -> None:
    """99 KiB of shared memory: `compiling_for` refuses what needs more."""
    K = 1024
    with compiling_for(89) as kernels:
        for rows in tuning.ROW_BUCKETS:
            x, w, norm = meta(rows, K, dtype=dtype), meta(1536, K, dtype=dtype), meta(K, dtype=dtype)
            matmul.rms_norm_matmul(x, norm, 1e-6, w, deterministic=deterministic)
            matmul.rms_norm_matmul_silu_and_mul(x, norm, 1e-6, w, deterministic=deterministic)
            if every_size or rows in (1, 16, 256):  # of the same tiles, without a norm in front or with an add behind
                matmul.matmul(x, w, deterministic=deterministic)
                matmul.matmul_add(x, w, meta(rows, 1536, dtype=dtype), deterministic=deterministic)
    assert max(kernel.metadata.shared for kernel in kernels) <= 99 * 1024
    assert {kernel.name for kernel in kernels} >= {"skinny_kernel", "tile_kernel"}


@pytest.mark.parametrize(("capability", "kibibytes"), [(75, 64), (80, 163), (86, 99), (89, 99), (90, 227), (120, 99)])
def test_shared_memory_of_cards(capability: int, kibibytes: int) -> None:
    """As NVIDIA lists it, of one block; a product of 16 rows has a stage less only where there is little."""
    assert shared_bytes(capability) == 1024 * kibibytes
    with pretending(Gpu("", capability, 40)):
        chosen = tuning.choose_matmul("matmul", 16, 1536, 1000, torch.float32, False, torch.device("meta"))
    assert chosen == MatmulConfig("split", 16, 16, 64, 4, num_stages=4 if kibibytes > 99 else 3, splits=4)


@kinds_and_sizes
def test_heuristic_products_on_hopper(every_size: bool) -> None:
    """Each configuration that the weights of a Llama of 1B are given, and of a Qwen of 1.5B, or one of each kind."""
    seen = {}
    for op, N, K in (
        ("rms_norm_matmul", 3072, 2048),
        ("matmul", 2048, 1536),
        ("matmul_add", 2048, 8192),
        ("matmul_add", 1536, 1536),
        ("matmul_silu_and_mul", 16384, 2048),
    ):
        for bucket in tuning.ROW_BUCKETS:
            for deterministic in (False, True):
                config = heuristic(op, bucket, N, K, torch.bfloat16, deterministic, hopper=True)
                if config.kernel != "apart":
                    one = (epilogue_of(op, config), config) if every_size else kind_of(op, config)
                    seen.setdefault(one, (config, op, N, K))
    assert {config.kernel for config, *_ in seen.values()} >= {"vector", "early", "split", "skinny", "wave", "hopper"}
    for product in seen.values():
        compile_product(*product, 90)


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_pointwise(capability: int) -> None:
    x, w, positions = meta(7, 4096), meta(4096), meta(7, dtype=torch.int32)
    table, scale = meta(4096, 128, dtype=torch.float32), meta(1, dtype=torch.float32)
    calls: list[Callable[[], object]] = [
        lambda: add_rms_norm.rms_norm(x, w, 1e-6),
        lambda: add_rms_norm.rms_norm(x, w, 1e-6, positions),
        lambda: add_rms_norm.add_rms_norm(x, x, w, 1e-6),
        lambda: add_rms_norm.add_rms_norm(x, x, w, 1e-6, positions),
        lambda: add_rms_norm.rms_norm(meta(7, 16, 128), meta(128), 1e-6),
        lambda: embedding.embedding(positions, meta(1000, 4096), 5),
        lambda: scaled_embedding.scaled_embedding(positions, meta(1000, 4096), 5, 12.0),
        lambda: silu_and_mul.silu_and_mul(x),
        lambda: gelu_and_mul.gelu_and_mul(x),
        lambda: add_normed.add_normed(x, x, w, 1e-6),
        lambda: add_normed.add_normed_rms_norm(x, x, w, w, 1e-6, positions),
        lambda: add_normed.add_normed_rms_norm(x, x, w, w, 1e-6, positions, scale=scale),
        lambda: soft_cap.soft_cap(x, 30.0),
        lambda: xielu.xielu(x, meta(4, dtype=torch.float32)),
        lambda: qk_norm.qk_squares(x, 2048, 1024),
        lambda: qk_norm.qk_norm(x, w[:3072], 2048, 1e-6),
        lambda: qk_norm.qk_norm(x, w[:3072], 2048, 1e-6, meta(2, 7, 2, dtype=torch.float32)),
        lambda: rotary.rotary(meta(7, 16, 128), meta(7, 8, 128), positions, table),
    ]
    for call in calls:
        with compiling_for(capability) as kernels:
            call()
        (kernel,) = kernels
        check(kernel, capability)


@pytest.mark.parametrize("width", [1024, 4096])
def test_norms_of_few_rows_take_more_warps(width: int) -> None:
    """Not in deterministic mode: a row's bits follow from their number."""
    w = meta(width)

    def warps(rows: int, deterministic: bool) -> int:
        x = meta(rows, width)
        with compiling_for(90) as kernels:
            add_rms_norm.rms_norm(x, w, 1e-6, deterministic=deterministic)
            add_rms_norm.add_rms_norm(x, x, w, 1e-6, deterministic=deterministic)
        (number,) = {kernel.metadata.num_warps for kernel in kernels}
        return int(number)

    assert warps(64, False) > warps(4096, False)
    assert warps(64, True) == warps(4096, True) == warps(4096, False) == add_rms_norm.row_warps(width)


def test_sizes_do_not_recompile() -> None:
    """Numbers of rows that steps differ in: one compiled kernel for all of them."""
    w = meta(512, 256)
    for config in (
        MatmulConfig("skinny", 16, 16, 64, 1),
        MatmulConfig("split", 16, 16, 64, 4, splits=4),
        MatmulConfig("tile", 64, 64, 64, 4),
    ):
        with compiling_for(90) as kernels:
            for rows in (1, 2, 13, 16, 64, 1000):
                launch_matmul(config, meta(rows, 256), w, meta(rows, 512))
        assert len({kernel.hash for kernel in kernels}) == 1


def test_embedding_is_a_border() -> None:
    """Attention reads what was planned ahead of it before it waits: nothing may start early around it."""
    with compiling_for(90) as kernels:
        embedding.embedding(meta(7, dtype=torch.int32), meta(1000, 4096))
        scaled_embedding.scaled_embedding(meta(7, dtype=torch.int32), meta(1000, 4096), 0, 12.0)
    assert len(kernels) == 2
    for kernel in kernels:
        assert "griddepcontrol" not in kernel.asm["ptx"]
        assert not kernel.metadata.launch_pdl
