"""The attention kernels compile for GPUs that are not here, at real head sizes and with every option."""

import re
from typing import Any

import pytest
import torch

from covering import covering, long
from ptx_arithmetic import exponentials
from tercet.triton_kernels import (
    attention,
    attention_prologue,
    write_kv,
)
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.prefill_work import PrefillWork

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("capability", "heads", "kv_heads", "head_dim", "num_tokens", "options"),
    [
        (90, 16, 8, 128, 300, {}),
        (90, 16, 8, 128, 3000, {}),
        (90, 32, 8, 128, 300, {"window": 4096}),
        (90, 7, 1, 64, 300, {"softcap": 30.0}),
        (90, 8, 8, 80, 300, {"alibi_slopes_H": True}),
        long(90, 8, 8, 64, 300, {"alibi_slopes_H": True, "softcap": 30.0}),
        long(90, 8, 2, 96, 300, {}),
        (90, 8, 4, 256, 300, {}),
        long(90, 8, 4, 256, 3000, {}),
        (90, 32, 4, 512, 300, {}),
        (89, 8, 1, 512, 300, {"window": 512}),
        long(80, 16, 2, 512, 300, {}),
        (80, 16, 8, 128, 300, {}),
        long(80, 8, 2, 256, 300, {}),
        long(89, 9, 3, 64, 300, {"alibi_slopes_H": True}),
        long(89, 16, 8, 128, 300, {}),
        (89, 8, 2, 256, 300, {"softcap": 30.0}),
        (89, 64, 1, 192, 300, {}),
        (90, 64, 8, 64, 300, {"sinks_H": True}),
        (90, 8, 4, 256, 300, {"window": 1024}),
        long(90, 64, 8, 64, 3000, {"window": 512, "sinks_H": True}),
        long(90, 64, 8, 64, 3000, {"window": 128, "sinks_H": True}),
        (89, 64, 8, 64, 300, {"window": 128, "sinks_H": True}),
        long(80, 8, 8, 80, 300, {"sinks_H": True}),
    ],
)
def test_compile(
    capability: int, heads: int, kv_heads: int, head_dim: int, num_tokens: int, options: dict[str, Any]
) -> None:  # fmt: skip
    of_heads = {"alibi_slopes_H": torch.float32, "sinks_H": torch.bfloat16}
    options = options | {name: meta(heads, dtype=dtype) for name, dtype in of_heads.items() if name in options}
    caches = meta(100, kv_heads, 64, head_dim), meta(100, kv_heads, 64, head_dim)
    table, indices, cos_sin = (
        meta(9, 64, dtype=torch.int32),
        meta(5, dtype=torch.int32),
        meta(4096, head_dim, dtype=torch.float32),
    )
    chunks = indices, indices, meta(6, dtype=torch.int32)
    with compiling_for(capability) as kernels:
        attention.decode_attention(meta(5, heads, head_dim), *caches, table, indices, indices, 0.1, **options)
        attention.prefill_attention(meta(num_tokens, heads, head_dim), *caches, table, *chunks, 0.1, **options)
        attention.plan_last_queries(*chunks, PrefillWork(meta(9, 8, dtype=torch.int32), 128))
        qkv = meta(5, (heads + 2 * kv_heads) * head_dim)
        slots = meta(5, dtype=torch.int64)
        none, norm = (None, None), (meta(head_dim),) * 2
        for norms, behind, values in ((none, False, False), (norm, False, head_dim == 512), (norm, True, False)):
            prologue = qkv, indices, slots, cos_sin, *norms, 1e-6, *caches, heads
            attention_prologue.attention_prologue(*prologue, behind=behind, norm_values=values)
        write_kv.write_kv(meta(5, kv_heads, head_dim), meta(5, kv_heads, head_dim), *caches, slots)
    # The decode rows: their plan, splits and merge. Prefill and its plan, one of last tokens, prologues, the write.
    assert len(kernels) == 10
    (prefill,) = (kernel for kernel in kernels if kernel.name.endswith("prefill_kernel"))
    # Every score of a tile by the same arithmetic, masked or not, and nothing of it left to the assembler.
    found = exponentials(prefill.asm["ptx"])
    assert len(found) == 1 + ("softcap" in options), found
    assert not any("?" in expression for expression in found), found
    if capability == 90:
        assert all("griddepcontrol.wait" in kernel.asm["ptx"] for kernel in kernels)
        known = head_dim in (64, 128, 256) and options.keys() <= {"window", "sinks_H"}
        known = known and options.get("window", 512) >= 256  # a short one is mostly ends
        assert (prefill.name == "hopper_prefill_kernel") == known
        assert "wgmma" in prefill.asm["ptx"]
        if known:  # few tiles leave multiprocessors to smaller ones
            few = -(-num_tokens // 64) * heads <= 2 * 132
            assert prefill.metadata.num_warps == (8 if few else 12)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(256, 64), long(256, 96)])
def test_heads_of_which_few_numbers_turn(head_dim: int, rotary_dim: int) -> None:
    heads, kv_heads, count = 16, 4, 300
    caches, qkv = (meta(100, kv_heads, 64, head_dim),) * 2, meta(count, (heads + 2 * kv_heads) * head_dim)
    places = meta(count, dtype=torch.int32), meta(count, dtype=torch.int64), meta(99, rotary_dim, dtype=torch.float32)
    with compiling_for(90) as kernels:
        attention_prologue.attention_prologue(qkv, *places, *(meta(head_dim),) * 2, 1e-6, *caches, heads)
    (kernel,) = kernels
    assert kernel.name == "partial_prologue_kernel"
    # A head's numbers stay in the layout that they are loaded in.
    moved = [line for line in kernel.asm["ttgir"].splitlines() if "ttg.convert_layout" in line]
    assert moved
    assert not any(re.search(r"tensor<(16|4)x(?!1x)\d", line) for line in moved), moved


@pytest.mark.long
def test_many_queries_of_a_row_fit_where_shared_memory_is_little() -> None:
    """As Qwen3-235B has heads, with eight guesses."""
    cache, indices, tries = meta(100, 4, 64, 128), meta(5, dtype=torch.int32), 9
    with compiling_for(89, lambda what: what.startswith("_decode_kernel")) as kernels:
        attention.decode_attention(
            meta(5 * tries, 64, 128), cache, cache, meta(9, 64, dtype=torch.int32), indices, indices, 0.1,
            tries=tries, lengths_T=meta(5 * tries, dtype=torch.int32),
        )  # fmt: skip
    assert len(kernels) == 1


@pytest.mark.parametrize("head_dim", [long(128), 256, long(512)])
def test_float32_fits_small_cards(head_dim: int) -> None:
    caches = [meta(100, 2, 64, head_dim, dtype=torch.float32) for _ in range(2)]
    table, indices = meta(9, 64, dtype=torch.int32), meta(5, dtype=torch.int32)
    q, begins = meta(300, 8, head_dim, dtype=torch.float32), meta(6, dtype=torch.int32)
    with compiling_for(89) as kernels:
        attention.decode_attention(q[:5], *caches, table, indices, indices, 0.1)
        attention.prefill_attention(q, *caches, table, indices, indices, begins, 0.1)
    assert {"_decode_kernel", "_prefill_kernel"} < {kernel.name for kernel in kernels}


@covering(1, capability=[90, 80], head_dim=[2, 4, 8], dtype=[torch.bfloat16, torch.float16, torch.float32])
def test_small_heads(capability: int, head_dim: int, dtype: torch.dtype) -> None:
    """Smaller than what `tl.dot` takes."""
    caches = [meta(100, 2, 64, head_dim, dtype=dtype) for _ in range(2)]
    table, indices = meta(9, 64, dtype=torch.int32), meta(5, dtype=torch.int32)
    q, begins = meta(300, 8, head_dim, dtype=dtype), meta(6, dtype=torch.int32)
    with compiling_for(capability) as kernels:
        attention.decode_attention(q[:5], *caches, table, indices, indices, 0.1)
        attention.prefill_attention(q, *caches, table, indices, indices, begins, 0.1)
    assert {"_decode_kernel", "_prefill_kernel"} < {kernel.name for kernel in kernels}
