"""The decoder through the kernels, in Triton's interpreter: the same logits as transformers."""

from unittest.mock import Mock

import pytest
import torch

from checkpoints import checkpoint, random_prompts, reference_model
from interpreted import rerun_interpreted
from paged_sequences import Sequences, make_decoder
from tercet.triton_kernels import matmul_parts
from tercet.triton_kernels.matmul import matmul_add
from tercet.triton_kernels.matmul_config import MatmulConfig


@pytest.mark.parametrize(
    ("family", "deterministic"),
    [
        ("qwen3", False),
        ("qwen3", True),
        ("qwen2", True),
        ("llama-bias-tied", False),
        ("mistral", False),
        ("phi3-long", False),
        ("granite", False),
    ],
)
def test_prefill_then_mixed_step(family: str, deterministic: bool) -> None:
    check(family, deterministic)


def test_products_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What attention and MLP add reaches the stream by the norm behind it, and at the end of all by an add."""
    config = MatmulConfig("skinny", 16, 32, 16, 1, parts=2)
    monkeypatch.setattr(matmul_parts, "choose_matmul", lambda *args: config)
    whole = Mock(side_effect=matmul_add)
    monkeypatch.setattr("tercet.model.linear.matmul_add", whole)
    check("qwen3", deterministic=False)
    assert not whole.called
    check("qwen3", deterministic=True)
    assert whole.called


def check(family: str, deterministic: bool) -> None:
    path = checkpoint(family)
    a, b = random_prompts(2, 9, 12, seed=6)
    with torch.inference_mode():
        wanted_a, wanted_b = (reference_model(path)(torch.tensor([ids])).logits[0] for ids in (a, b))
    run = Sequences(
        make_decoder(path, layout="fused", deterministic=deterministic), 2, whole=family in ("qwen2", "mistral")
    )
    first = run.step({}, {0: a[:-1], 1: b[:3]})
    second = run.step({0: a[-1]}, {1: b[3:6]}, pad_b=1, pad_t=2)
    for got, wanted in [(first, (wanted_a[-2], wanted_b[2])), (second, (wanted_a[-1], wanted_b[5]))]:
        want = torch.stack(wanted)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_with_kernels() -> None:
    rerun_interpreted(__file__)
