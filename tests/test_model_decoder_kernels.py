"""The decoder through the kernels, in Triton's interpreter: the same logits as transformers."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from checkpoints import checkpoint, make_checkpoint, random_prompts, reference_model
from covering import long
from interpreted import rerun_interpreted
from paged_sequences import Sequences, make_decoder
from slot_tables import random_table
from tercet.model import attention_plan
from tercet.triton_kernels import decode_few, fused_decode, matmul_parts
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.matmul import matmul_add
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.sample import sample


@pytest.mark.parametrize(
    ("family", "deterministic"),
    [
        ("qwen3", False),
        long("qwen3", True),
        long("qwen2", True),
        long("llama-bias-tied", False),
        ("mistral", False),
        long("phi3-long", False),
        long("granite", False),
        long("gemma2", False),
        ("gemma3", True),
        long("gemma4", True),
        long("gemma4", False),
        ("gemma4-told", True),
        long("gemma4-told", False),
        long("gemma4-moe", False),
        long("gemma4-moe", True),
        long("olmo2", False),
        long("glm4", False),
        long("mixtral", False),
        long("qwen3-moe", True),
        long("qwen2-moe", False),
        long("glm4-moe", True),
        ("gpt-oss", False),
        long("deepseek-v2", False),
        long("deepseek-v3", True),
        ("glm4-moe-lite", True),
        long("minicpm3", False),
        long("youtu", False),
        long("granite-h", False),
        long("granite-h-dense", True),
        ("nemotron-h", False),
        *(long(family, False) for family in ("ministral3", "exaone4", "hunyuan", "apertus", "arcee-bias")),
        *(long(family, True) for family in ("mistral4", "ernie4.5-moe", "hunyuan-moe")),
    ],
)
def test_prefill_then_mixed_step(family: str, deterministic: bool) -> None:
    check(checkpoint(family), deterministic, whole=family in ("qwen2", "mistral"))


def test_layers_that_are_fused_and_layers_that_borrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Hopper, by the kernel for few rows, which norms values too; the others attend to what it has written."""
    monkeypatch.setattr(attention_plan, "can_fuse_decode", lambda *args, **options: True)
    monkeypatch.setattr(fused_decode, "_FEW_ROWS", 8)
    fused = Mock(side_effect=decode_few.launch_few_rows)
    monkeypatch.setattr(fused_decode, "launch_few_rows", fused)
    path = make_checkpoint("gemma4-told", tmp_path, head_dim=64, global_head_dim=128)
    check(path, deterministic=False)
    assert fused.call_count == (3 if INTERPRETED else 0), "of the second step, each layer that has keys of its own"


def test_draws_are_from_logits_with_their_cap() -> None:
    decoder = make_decoder(checkpoint("gemma2"), layout="fused")
    hidden_RD, rows_R = torch.randn(3, 64), torch.arange(3, dtype=torch.int32)
    tables = [random_table(4, 2, 16, 419, seed=1) for _ in range(2)]
    for table in tables:
        table.temperature_S.fill_(3.0)
    positions_R = tables[0].length_S[:3].clone()
    logits_RV = decoder.head.logits(hidden_RD)
    assert logits_RV.abs().max() < decoder.config.logit_softcap
    got = decoder.head.sample(hidden_RD, rows_R, positions_R, tables[0])
    assert torch.equal(got, sample(logits_RV, rows_R, positions_R, tables[1]))


def test_products_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What attention and MLP add reaches the stream by the norm behind it, and at the end of all by an add."""
    config = MatmulConfig("skinny", 16, 32, 16, 1, parts=2)
    monkeypatch.setattr(matmul_parts, "choose_matmul", lambda *args: config)
    whole = Mock(side_effect=matmul_add)
    monkeypatch.setattr("tercet.model.linear.matmul_add", whole)
    check(checkpoint("qwen3"), deterministic=False)
    assert not whole.called
    check(checkpoint("qwen3"), deterministic=True)
    assert whole.called


def check(path: Path, deterministic: bool, *, whole: bool = False) -> None:
    a, b = random_prompts(2, 9, 12, seed=6)
    with torch.inference_mode():
        wanted_a, wanted_b = (reference_model(path)(torch.tensor([ids])).logits[0] for ids in (a, b))
    run = Sequences(make_decoder(path, layout="fused", deterministic=deterministic), 2, whole=whole)
    first = run.step({}, {0: a[:-1], 1: b[:3]})
    second = run.step({0: a[-1]}, {1: b[3:6]}, pad_b=1, pad_t=2)
    for got, wanted in [(first, (wanted_a[-2], wanted_b[2])), (second, (wanted_a[-1], wanted_b[5]))]:
        want = torch.stack(wanted)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_with_kernels() -> None:
    rerun_interpreted(__file__)
