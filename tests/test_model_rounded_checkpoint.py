"""Weights rounded to FP8 while they are read: numbers, on each rank, and answers are those of a rounded checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from checkpoints import checkpoint, random_prompts, reference_greedy
from covering import long
from loaded_weights import tensors_of
from quantized_checkpoints import Way, awq, quantized
from tercet.ipc.messages import SamplingParams
from tercet.model.checkpoint import open_model
from tercet.model.load import open_for
from tercet.model.rounded_checkpoint import RoundedCheckpoint
from tercet.model.weights import load_weights
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.dispatch import INTERPRETED, Gpu, pretending
from whole_engine import ids_of, tiny_engine

CPU, META = torch.device("cpu"), torch.device("meta")


def by_rows(weight: Tensor, rng: np.random.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """What rows stand for when their largest number is 448."""
    scales = weight.double().abs().amax(1, keepdim=True) / 448
    return {}, ((weight.double() / scales).to(FP8).double() * scales).to(weight.dtype)


def meant(family: str, folder: Path) -> Path:
    """The checkpoint of rounded numbers."""
    return quantized(checkpoint(family), Way({}, by_rows), folder, wanted=lambda name: "kv_b_proj" not in name)[1]


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "phi3", "gemma4", "glm", "deepseek-v3", "qwen3.5"])
def test_numbers(family: str, tmp_path: Path) -> None:
    """Of each rank of one, two and four."""
    config, wanted = open_model(meant(family, tmp_path))
    rounded = RoundedCheckpoint(open_model(checkpoint(family))[1], CPU)
    assert rounded.quantized()
    options: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
    for rank, size in [(0, 1), (1, 2)]:
        ours, theirs = (load_weights(one, config, rank=rank, size=size, **options) for one in (rounded, wanted))
        assert torch.equal(ours.embedding_VD, theirs.embedding_VD)
        for own, other in zip(ours.layers, theirs.layers, strict=True):
            for a, b in zip(tensors_of(own), tensors_of(other), strict=True):
                # In fp32 a quotient next to the middle of two numbers may become the other one.
                assert ((a - b).abs() > 1e-6 * b.abs()).float().mean() < 1e-3


@pytest.mark.parametrize("family", ["qwen3", long("qwen3-moe"), long("gemma3"), long("gemma4")])
def test_answers(family: str, tmp_path: Path) -> None:
    prompts = random_prompts(4, 5, 60)
    with tiny_engine(family, quantization="fp8") as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert ids_of(outputs) == reference_greedy(meant(family, tmp_path), prompts, 12)


@pytest.mark.skipif(INTERPRETED, reason="means a card that is not there")
def test_small_ones_are_kept_too() -> None:
    with pretending(Gpu("NVIDIA H200", 90, 132)):
        opened = open_for(checkpoint("qwen3"), META, dtype="bfloat16", quantization="fp8")
    assert opened.kept.keys() == RoundedCheckpoint(opened.tensors, META).quantized()
    assert opened.num_expanded == 0


def test_refused(tmp_path: Path) -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True}
    stored, _ = quantized(checkpoint("qwen3"), Way(settings, awq(16)), tmp_path)
    with pytest.raises(ValueError, match=r"--quantization got 'fp8', and .* is quantized already; want auto"):
        open_for(stored, CPU, quantization="fp8")
    with (
        pretending(Gpu("NVIDIA A100", 80, 108)),
        pytest.raises(ValueError, match=r"compute capability 8\.0; want a GPU of"),
    ):
        open_for(checkpoint("qwen3"), META, dtype="bfloat16", quantization="fp8")
    with pretending(Gpu("NVIDIA H200", 90, 132)), pytest.raises(ValueError, match="in float32 on a GPU; want --dtype"):
        open_for(checkpoint("qwen3"), META, dtype="float32", quantization="fp8")
