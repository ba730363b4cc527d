"""Prefill attention compiles for cards that are not here: over a cache in FP8, and where tiles are cut by keys too."""

from typing import Any

import pytest
import torch

from tercet.triton_kernels import attention
from tercet.triton_kernels.attention import DEEP, DEEPER
from tercet.triton_kernels.attention_reference import Scoring
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("head_dim", "num_tokens", "name"),
    [(128, 3000, "fp8_prefill_kernel"), (64, 300, "fp8_prefill_kernel"), (256, 300, "_prefill_kernel")],
)
def test_prompts_over_cells_in_fp8(head_dim: int, num_tokens: int, name: str) -> None:
    cache, table, indices = meta(100, 4, 64, head_dim, dtype=FP8), meta(9, 64, dtype=torch.int32), meta(5).int()
    with compiling_for(90) as kernels:
        chunks = table, indices, indices, meta(6).int()
        attention.prefill_attention(meta(num_tokens, 16, head_dim), cache, cache, *chunks, 0.1)
    assert [kernel.name for kernel in kernels] == ["_cut_kernel", name]


@pytest.mark.parametrize(
    ("heads", "deep", "most"),
    [(16, DEEP, 256), (16, DEEPER, 512), (24, DEEP, 128), (24, DEEPER, 128), (64, DEEP, 64), (16, DEEP - 1, 0)],
)
@pytest.mark.parametrize("more", [0, 1])
def test_few_queries_behind_many(heads: int, deep: int, most: int, more: int) -> None:
    """Tiles are cut by keys too while two parts of each can run at once, of two heads that have the same keys."""
    num_tokens, cut = max(most, 64) + more, most and not more
    q, cache = meta(num_tokens, heads, 128), meta(100, 8, 64, 128)
    table, chunks, begins = meta(9, 64, dtype=torch.int32), meta(5, dtype=torch.int32), meta(6, dtype=torch.int32)
    names = ["_cut_kernel", "_part_kernel", "hopper_prefill_kernel", "_merge_kernel"]
    with compiling_for(90) as kernels:
        scoring = Scoring(0.1)
        work = attention.plan_prefill(chunks, chunks, begins, num_tokens, heads, cache, scoring, deep=deep)
        attention.prefill_attention(q, cache, cache, table, chunks, chunks, begins, 0.1, work=work)
    assert [kernel.name for kernel in kernels] == (names if cut else [names[0], names[2]])
    assert kernels[-2 if cut else -1].metadata.num_warps == (12 if cut and heads == 16 and deep == DEEPER else 8)
    assert all("griddepcontrol.wait" in kernel.asm["ptx"] for kernel in kernels)


@pytest.mark.parametrize(
    ("capability", "options"),
    [(80, {}), (89, {"softcap": 30.0}), (90, {"softcap": 30.0}), (89, {"sinks_H": meta(16)})],
    ids=["80-plain", "89-softcap", "90-softcap", "89-sinks"],
)
def test_few_queries_behind_many_elsewhere(capability: int, options: dict[str, Any]) -> None:
    q, cache = meta(64, 16, 128), meta(100, 8, 64, 128)
    table, chunks, begins = meta(9, 64, dtype=torch.int32), meta(5, dtype=torch.int32), meta(6, dtype=torch.int32)
    with compiling_for(capability) as kernels:
        scoring = Scoring(0.1, **options)
        work = attention.plan_prefill(chunks, chunks, begins, 64, 16, cache, scoring, deep=DEEPER)
        attention.prefill_attention(q, cache, cache, table, chunks, chunks, begins, 0.1, work=work, **options)
        windowed = attention.plan_prefill(chunks, chunks, begins, 64, 16, cache, Scoring(0.1, 100), deep=DEEPER)
    names = [kernel.name for kernel in kernels]
    assert names == ["_cut_kernel", "_part_kernel", "_prefill_kernel", "_merge_kernel", "_cut_kernel"]
    assert windowed.parts is None, "of a window there is little to cut"
