"""The decode kernels that take q, k, v rows as they are compile for GPUs that are not here; which steps they serve."""

import re
import subprocess
import tempfile
from typing import Any

import pytest
import torch
from triton import knobs
from triton.compiler import CompiledKernel

from covering import covering, long
from tercet.model.attention_plan import Attending, AttentionPlan
from tercet.triton_kernels import fused_decode
from tercet.triton_kernels.attention_reference import Scoring
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.decode_shares import DecodeShares
from tercet.triton_kernels.decode_work import DecodeWork
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.few_rows import FewRows
from tercet.triton_kernels.fused_decode import LONG
from tercet.triton_kernels.prepare import StepInputs

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


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
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 4, 256), long(32, 2, 128)])
def test_heads_of_which_few_numbers_turn(
    heads: int, kv_heads: int, head_dim: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows have gates behind their heads."""
    decode = compile_fused_decode(90, heads, kv_heads, head_dim, True, kernel, monkeypatch, rotary_dim=64)[1]
    assert "STACK:0 " in resource_usage(decode)


@pytest.mark.parametrize("kernel", ["few", "many", "fixed"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "cells"),
    [
        (8, 1, 256, torch.bfloat16),
        (16, 2, 512, torch.bfloat16),
        *(long(heads, *sizes) for heads in (8, 16) for sizes in ((2, 256, FP8), (8, 256, torch.bfloat16))),
        *(long(8, kv_heads, 512, cells) for kv_heads in (1, 2, 4) for cells in (torch.bfloat16, FP8)),
    ],
)
def test_values_that_are_normed(
    heads: int, kv_heads: int, head_dim: int, cells: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One inverse root more, and nothing that does not fit registers: of heads of 512 numbers next to nothing, most of
    it where a row begins."""
    ways: dict[str, Any] = {"cells": cells, "window": 0 if head_dim == 512 else 512}
    sizes = heads, kv_heads, head_dim, True, kernel, monkeypatch
    plain, normed = (compile_fused_decode(90, *sizes, **ways, norm_values=norm)[1] for norm in (False, True))
    roots = [decode.asm["ptx"].count("rsqrt") for decode in (plain, normed)]
    assert roots[0] < roots[1]
    told = re.search(r"STACK:(\d+) ", resource_usage(normed))
    assert told is not None
    assert int(told[1]) <= (0 if head_dim < 512 else 8 if cells == torch.bfloat16 else 160)


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
    cells = meta(1, num_tokens, dtype=torch.int64)
    inputs = StepInputs(
        input_ids_T=tokens, positions_T=tokens, kv_slots_XT=cells, decode_slots_B=slots, decode_lengths_B=slots,
        chunk_slots_C=none, chunk_starts_C=none, query_starts_C1=slots[:1], sample_rows_R=none,
        num_tokens_1=slots[:1], tries=tries, lengths_T=tokens,
    )  # fmt: skip
    attending = Attending(Scoring(0.1), meta(100, 8, 64, head_dim), head_dim, 0)
    with compiling_for(90):
        plan = AttentionPlan.of_step(
            inputs, [attending] * 2, meta(9, 64, dtype=torch.int32), num_heads=heads, deterministic=False,
            longest=longest, deep=0,
        )  # fmt: skip
    assert isinstance(plan.decode[attending.kind], FewRows if fuses else DecodeWork)
    assert plan.decode[attending.kind].tries == tries


def test_layers_that_borrow_are_not_fused() -> None:
    """They have no keys of their own. What is like them is fused all the same, and plans that can be are shared."""
    slots, none = meta(40, dtype=torch.int32), meta(0, dtype=torch.int32)
    inputs = StepInputs(
        input_ids_T=slots, positions_T=slots, kv_slots_XT=meta(1, 40, dtype=torch.int64), decode_slots_B=slots,
        decode_lengths_B=slots, chunk_slots_C=none, chunk_starts_C=none, query_starts_C1=slots[:1], sample_rows_R=none,
        num_tokens_1=slots[:1],
    )  # fmt: skip
    near = Attending(Scoring(0.1, window=512), meta(100, 1, 64, 256), 256, 0)
    far = Attending(Scoring(0.1, softcap=5.0), meta(100, 1, 64, 256), 256, 0)
    attending = [near, far, near._replace(borrowed=True), far._replace(borrowed=True)]
    with compiling_for(90):
        plan = AttentionPlan.of_step(
            inputs, attending, meta(9, 64, dtype=torch.int32), num_heads=8, deterministic=False, longest=0, deep=0
        )
    own, capped, borrowed, capped_too = (plan.decode[layer.kind] for layer in attending)
    assert isinstance(own, DecodeShares)
    assert isinstance(borrowed, DecodeWork)
    assert isinstance(capped, DecodeWork)
    assert capped is capped_too


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
    shifted: bool = False, rotary_dim: int = 0, norm_values: bool = False,
) -> list[CompiledKernel]:  # fmt: skip
    """Plan, attention and merge of five rows, by one of the kernels. `rotary_dim`: so many numbers turn, and rows are
    parts of longer ones; 0: all, and they are not."""
    monkeypatch.setattr(fused_decode, "_FEW_ROWS", 8 if kernel == "few" else 0)
    monkeypatch.setattr(fused_decode, "_FEW_SEEN", 0)
    cache, norm = meta(100, kv_heads, 64, head_dim, dtype=cells), meta(head_dim) if normed else None
    table, lengths = meta(9, 64, dtype=torch.int32), meta(5, dtype=torch.int32)
    size, turned = (heads + 2 * kv_heads) * head_dim, rotary_dim or head_dim
    qkv = meta(5, size + heads * head_dim * (rotary_dim > 0))[:, :size]
    with compiling_for(capability) as kernels:
        shares = fused_decode.plan_fused_decode(
            lengths, lengths, table, heads, cache, window=window, deterministic=kernel == "fixed"
        )
        fused_decode.fused_decode_attention(
            qkv, meta(4096, turned, dtype=torch.float32), norm, norm, 1e-6, cache, cache, table, shares, heads, 0.1,
            meta(5, heads, head_dim), meta(heads) if sinks else None, meta(9, dtype=torch.int32) if shifted else None,
            norm_values=norm_values,
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
