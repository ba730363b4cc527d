"""The decoder through the kernels, in Triton's interpreter: the same logits as transformers."""

import pytest
import torch

from checkpoints import checkpoint, random_prompts, reference_model
from interpreted import rerun_interpreted
from paged_sequences import Sequences, make_decoder


@pytest.mark.parametrize(
    ("family", "deterministic"),
    [("qwen3", False), ("qwen3", True), ("qwen2", True), ("llama-bias-tied", False), ("mistral", False)],
)
def test_prefill_then_mixed_step(family: str, deterministic: bool) -> None:
    path = checkpoint(family)
    a, b = random_prompts(2, 9, 12, seed=6)
    with torch.inference_mode():
        wanted_a, wanted_b = (reference_model(path)(torch.tensor([ids])).logits[0] for ids in (a, b))
    run = Sequences(make_decoder(path, layout="fused", deterministic=deterministic), 2)
    first = run.step({}, {0: a[:-1], 1: b[:3]})
    second = run.step({0: a[-1]}, {1: b[3:6]}, pad_b=1, pad_t=2)
    for got, wanted in [(first, (wanted_a[-2], wanted_b[2])), (second, (wanted_a[-1], wanted_b[5]))]:
        want = torch.stack(wanted)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_with_kernels() -> None:
    rerun_interpreted(__file__)
