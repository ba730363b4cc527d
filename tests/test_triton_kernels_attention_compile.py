"""The attention kernels compile for GPUs that are not here, at real head sizes and with every option."""

import re
import subprocess
import tempfile
from typing import Any

import pytest
import torch
from triton import knobs
from triton.compiler import CompiledKernel

from covering import covering, long
from ptx_arithmetic import exponentials
from tercet.model.attention_plan import Attending, AttentionPlan
from tercet.triton_kernels import (
    attention,
    attention_prologue,
    fused_decode,
    write_kv,
)
from tercet.triton_kernels.attention_reference import Scoring
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.decode_work import DecodeWork
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.few_rows import FewRows
from tercet.triton_kernels.fused_decode import LONG
from tercet.triton_kernels.prefill_work import PrefillWork
from tercet.triton_kernels.prepare import StepInputs

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


@covering(
    2, sizes=[(16, 8, 128), (14, 2, 64)], normed=[False, True], kernel=["few", "many", "fixed"],
    cells=[torch.bfloat16, FP8], window=[0, 128], sinks=[False, True],
)  # fmt: skip
def test_compile_fused_decode(
    sizes: tuple[int, int, int], normed: bool, kernel: str, cells: torch.dtype, window: int, sinks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`sizes`: query heads, KV heads and their width."""
    plan, decode, merge = compile_fused_decode(90, *sizes, normed, kernel, monkeypatch, cells, window, sinks)
    assert ("cp.async.bulk.tensor" in decode.asm["ptx"]) == (kernel != "few")
    assert (decode.name == "fixed_decode_kernel") == (kernel == "fixed")
    assert "mma.sync" in decode.asm["ptx"]
    for one in (plan, decode, merge):
        assert one.asm["cubin"]
        assert "griddepcontrol.wait" in one.asm["ptx"]


@pytest.mark.parametrize("kernel", ["few", "many", "fixed"])
@pytest.mark.parametrize(
    ("kv_heads", "cells"), [(4, torch.bfloat16), long(4, FP8), long(1, torch.bfloat16), long(1, FP8)]
)
def test_wide_heads_are_held_in_registers(
    kv_heads: int, cells: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = compile_fused_decode(90, 8, kv_heads, 256, True, kernel, monkeypatch, cells, 1024)[1]
    assert "STACK:0 " in resource_usage(decode)


@pytest.mark.parametrize("kernel", ["few", "many", "fixed"])
def test_compile_fused_decode_behind_images(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One load more, and only there."""
    plain = compile_fused_decode(90, 16, 8, 128, True, kernel, monkeypatch)[1]
    shifted = compile_fused_decode(90, 16, 8, 128, True, kernel, monkeypatch, shifted=True)[1]
    loads = [kernel.asm["ptx"].count("ld.global") for kernel in (plain, shifted)]
    assert loads[0] < loads[1] <= loads[0] + 2


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "tries", "cells", "window", "sinks", "shifted"),
    [
        (16, 8, 128, 4, torch.bfloat16, 0, False, False),
        (32, 8, 128, 8, FP8, 0, False, True),
        (64, 8, 64, 8, torch.bfloat16, 128, True, False),
        (8, 4, 256, 8, torch.bfloat16, 512, False, False),
    ],
)
def test_compile_tried_rows(
    heads: int, kv_heads: int, head_dim: int, tries: int, cells: torch.dtype, window: int, sinks: bool, shifted: bool
) -> None:
    """Two slots with several tokens each, also as many as there may be: with all they hold in registers."""
    cache, norm, ints = meta(100, kv_heads, 64, head_dim, dtype=cells), meta(head_dim), meta(2, dtype=torch.int32)
    scoring = Scoring(0.1, window)
    with compiling_for(90) as kernels:
        assert fused_decode.can_fuse_decode(cache, heads, head_dim, scoring, tries=tries, num_rows=2)
        shares = fused_decode.plan_fused_decode(
            ints, ints, meta(9, 64, dtype=torch.int32), heads, cache, window=window, tries=tries,
            lengths_T=meta(2 * tries, dtype=torch.int32),
        )  # fmt: skip
        fused_decode.fused_decode_attention(
            meta(2 * tries, (heads + 2 * kv_heads) * head_dim), meta(4096, head_dim, dtype=torch.float32), norm, norm,
            1e-6, cache, cache, meta(9, 64, dtype=torch.int32), shares, heads, 0.1, meta(2 * tries, heads, head_dim),
            meta(heads) if sinks else None, meta(9, dtype=torch.int32) if shifted else None,
        )  # fmt: skip
    plan, decode, merge = kernels
    assert (decode.name, merge.name) == ("tried_rows_kernel", "tried_rows_merge_kernel")
    for one in (plan, decode, merge):
        assert "griddepcontrol.wait" in one.asm["ptx"]
    assert "STACK:0 " in resource_usage(decode)


@pytest.mark.parametrize(
    ("num_rows", "tries", "heads", "head_dim", "longest", "fuses"),
    [
        (1, 4, 16, 128, 0, True),
        (4, 16, 16, 128, 5000, True),
        (4, 16, 16, 128, LONG, False),
        (8, 4, 16, 128, 1536, True),
        (9, 4, 16, 128, 0, False),
        (1, 8, 32, 128, 0, True),
        (1, 9, 32, 128, 0, False),
        (4, 16, 32, 64, 0, True),
        (4, 2, 32, 80, 0, False),
    ],
)
def test_few_slots_that_try_tokens_ahead_are_fused(
    num_rows: int, tries: int, heads: int, head_dim: int, longest: int, fuses: bool
) -> None:
    num_tokens, none = num_rows * tries, meta(0, dtype=torch.int32)
    slots, tokens = meta(num_rows, dtype=torch.int32), meta(num_tokens, dtype=torch.int32)
    inputs = StepInputs(
        input_ids_T=tokens, positions_T=tokens, kv_slots_T=meta(num_tokens, dtype=torch.int64), decode_slots_B=slots,
        decode_lengths_B=slots, chunk_slots_C=none, chunk_starts_C=none, query_starts_C1=slots[:1], sample_rows_R=none,
        num_tokens_1=slots[:1], tries=tries, lengths_T=tokens,
    )  # fmt: skip
    attending = Attending(Scoring(0.1), meta(100, 8, 64, head_dim), head_dim)
    with compiling_for(90):
        plan = AttentionPlan.of_step(
            inputs, [attending] * 2, meta(9, 64, dtype=torch.int32), num_heads=heads, deterministic=False,
            longest=longest, deep=0,
        )  # fmt: skip
    assert isinstance(plan.decode[attending.kind], FewRows if fuses else DecodeWork)
    assert plan.decode[attending.kind].tries == tries


@pytest.mark.parametrize(("capability", "heads", "kv_heads", "head_dim"), [(80, 16, 8, 128), (89, 5, 5, 64)])
def test_compile_few_rows_elsewhere(
    capability: int, heads: int, kv_heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, decode, merge = compile_fused_decode(capability, heads, kv_heads, head_dim, True, "few", monkeypatch)
    assert "mma.sync" in decode.asm["ptx"]
    assert "griddepcontrol" not in decode.asm["ptx"] + merge.asm["ptx"]


def compile_fused_decode(
    capability: int, heads: int, kv_heads: int, head_dim: int, normed: bool, kernel: str,
    monkeypatch: pytest.MonkeyPatch, cells: torch.dtype = torch.bfloat16, window: int = 0, sinks: bool = False,
    shifted: bool = False,
) -> list[CompiledKernel]:  # fmt: skip
    """Plan, attention and merge of five rows, by one of the kernels."""
    monkeypatch.setattr(fused_decode, "_FEW_ROWS", 8 if kernel == "few" else 0)
    monkeypatch.setattr(fused_decode, "_FEW_SEEN", 0)
    cache, norm = meta(100, kv_heads, 64, head_dim, dtype=cells), meta(head_dim) if normed else None
    table, lengths = meta(9, 64, dtype=torch.int32), meta(5, dtype=torch.int32)
    with compiling_for(capability) as kernels:
        shares = fused_decode.plan_fused_decode(
            lengths, lengths, table, heads, cache, window=window, deterministic=kernel == "fixed"
        )
        fused_decode.fused_decode_attention(
            meta(5, (heads + 2 * kv_heads) * head_dim), meta(4096, head_dim, dtype=torch.float32), norm, norm, 1e-6,
            cache, cache, table, shares, heads, 0.1, meta(5, heads, head_dim), meta(heads) if sinks else None,
            meta(9, dtype=torch.int32) if shifted else None,
        )  # fmt: skip
    return kernels


def resource_usage(kernel: CompiledKernel) -> str:
    """What the assembler says of a kernel's registers, stack and shared memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
    return told.stdout + told.stderr
