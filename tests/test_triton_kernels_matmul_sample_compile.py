"""Products that draw compile for GPUs that are not here, and sum as the products do whose logits go to memory."""

import re
from dataclasses import fields

import pytest
import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from covering import kinds_and_sizes, long
from slot_tables import random_table
from tercet.triton_kernels import sample as sample_module
from tercet.triton_kernels import sample_shard, tuning
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED, Gpu, pretending
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.matmul_draw import Draw
from tercet.triton_kernels.matmul_launch import launch_matmul, num_tiles
from tercet.triton_kernels.slot_table import MAX_STOP_IDS, SlotTable
from tercet.triton_kernels.tuning import choose_matmul_sample

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")
V = 151936


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def compile_draw(
    config: MatmulConfig, K: int, capability: int, dtype: torch.dtype = torch.bfloat16, normed: bool = False
) -> tuple[CompiledKernel, CompiledKernel | None]:
    """The product that draws; the one that stores, if its bits are not those of every other kernel."""
    rows = 1 if config.kernel == "vector" else 4 * config.block_m
    x, w, norm = meta(rows, K, dtype=dtype), meta(V, K, dtype=dtype), meta(K, dtype=dtype) if normed else None
    tiles = num_tiles(config, V)
    numbers = meta(9, dtype=torch.float32), meta(9, dtype=torch.int64), meta(9), meta(9, MAX_STOP_IDS)
    best = meta(rows, tiles, dtype=torch.float32), meta(rows, tiles)
    draw = Draw(meta(rows), meta(rows), *numbers, *best, meta(1), tiles, 9, 12, 0, V - 5, 1e-5)
    with compiling_for(capability) as kernels:
        launch_matmul(config, x, w, None, "sample", None, norm, 1e-6, draw=draw)
        if config.kernel not in tuning.PLAIN_ORDER:
            launch_matmul(config, x, w, meta(rows, V, dtype=dtype), "store", None, norm, 1e-6)
    return kernels[0], kernels[1] if kernels[1:] else None


def sums(kernel: CompiledKernel) -> list[str]:
    """The products and sums of a kernel with the layout of each, in order."""
    code = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    found = re.findall(r"arith\.addf .*\n.*tt\.reduce\.return.*\n.*: \(tensor<(.*)>\) ->|= tt\.dot .* : (.*) loc", code)
    return [re.sub(r"#(?!ttg)\w+", lambda name: layouts.get(name[0], name[0]), one or other) for one, other in found]


@kinds_and_sizes
def test_tuned(every_size: bool) -> None:
    with pretending(Gpu("NVIDIA H200", 90, 132)):
        configs = {
            choose_matmul_sample(rows, V, K, torch.bfloat16, False, torch.device("meta")): K
            for K in (1024, 4096)
            for rows in (1, 8, 16, 32, 64, 128, 192, 256)
        }
    assert {config.kernel for config in configs} == {"apart", "skinny", "wave", "persistent"}
    seen = set()
    for config, K in configs.items():
        kind = config.kernel, config.block_m >= 64, config.extra, config.tall, config.prefetch > 0
        if config.kernel == "apart" or (kind in seen and not every_size):
            continue
        seen.add(kind)
        drawing, storing = compile_draw(config, K, 90)
        assert storing is None or sums(drawing) == sums(storing) != []
        waits, lets = (drawing.asm["ptx"].find(f"griddepcontrol.{word}") for word in ("wait", "launch_dependents"))
        assert 0 < lets < waits, config
        assert re.search(r"cvt\.rn\.bf16(x2)?\.f32", drawing.asm["ptx"]), "logits are rounded as if they were stored"
        assert "lg2.approx" in drawing.asm["ptx"]


@pytest.mark.parametrize("capability", [long(80), 89, 90])
def test_untuned(capability: int) -> None:
    for rows, dtype, normed in (
        (1, torch.bfloat16, True),
        (8, torch.bfloat16, True),
        (64, torch.float16, False),
        (256, torch.bfloat16, False),
        (256, torch.float32, False),
    ):
        with pretending(Gpu("", capability, 132)):
            config = choose_matmul_sample(rows, V, 1024, dtype, False, torch.device("meta"))
        assert (config.kernel == "apart") == (rows == 1)
        if config.kernel == "apart":
            continue
        norms = normed and config.kernel == "split"
        drawing, storing = compile_draw(config, 1024, capability, dtype, norms)
        assert drawing.asm["cubin"]
        assert storing is None or sums(drawing) == sums(storing) != []


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("num_tiles", [75, 2374, 37984])
def test_merge(num_tiles: int, capability: int) -> None:
    pdl = capability == 90
    on_cpu = random_table(9, 4, 64, 1000, 0)
    table = SlotTable(**{field.name: getattr(on_cpu, field.name).to("meta") for field in fields(SlotTable)})
    scores, ids = meta(3, num_tiles, dtype=torch.float32), meta(3, num_tiles)
    with compiling_for(capability) as kernels:
        for size in (1, 2):
            shard = sample_shard.VocabShard(0, V, (lambda best: torch.stack([best, best])) if size > 1 else None)
            ring = sample_module.TokenRing(meta(4, 8), meta(1))
            sample_shard.append_best(ring, scores, ids, meta(3), meta(3), table, shard)
    assert len(kernels) == (5 if num_tiles > 4096 else 3)
    for kernel in kernels:
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == pdl
