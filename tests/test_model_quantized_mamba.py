"""Quantized checkpoints of Nemotron-H: what blocks with and without experts and gates make of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import checkpoint, make_checkpoint, random_prompts, reference_greedy
from loaded_weights import load, tensors_of, weight_list
from quantized_checkpoints import quantized
from scaled_weights import META
from tercet.ipc.messages import SamplingParams
from tercet.model.checkpoint import open_model
from tercet.model.load import kept_as_stored
from tercet.model.weights import load_weights
from tercet.triton_kernels.dispatch import Gpu, pretending
from tercet.triton_kernels.scaled_weight import ScaledWeight
from tercet.triton_kernels.widen import plain
from test_model_quantized import WAYS
from whole_engine import ids_of, tiny_engine


@pytest.mark.parametrize("way", ["modelopt", "modelopt, rows", "packed 8"])
def test_weights_are_what_they_stand_for(way: str, tmp_path: Path) -> None:
    stored, meant = quantized(checkpoint("nemotron-h"), WAYS[way], tmp_path)
    for rank, size in ((0, 1), (1, 2)):
        for ours, theirs in zip(load(stored, rank, size).layers, load(meant, rank, size).layers, strict=True):
            for one, other in zip(tensors_of(ours), tensors_of(theirs), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


def test_all_but_mamba_s_own_is_kept(tmp_path: Path) -> None:
    """On a GPU: what experts have, and of layers whose matrices are large what attention has."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128}
    model = make_checkpoint("nemotron-h", tmp_path / "model", **sizes, moe_shared_expert_intermediate_size=256)
    stored, meant = quantized(model, WAYS["modelopt"], tmp_path)
    config, tensors = open_model(stored)
    with pretending(Gpu("NVIDIA H200", 90, 132)):
        kept = kept_as_stored(tensors, torch.bfloat16, META)
    assert any(".experts." in name for name in kept)
    assert not any(".mamba." in name for name in kept)
    options: dict[str, Any] = {"rank": 0, "size": 1, "dtype": torch.bfloat16, "device": torch.device("cpu")}
    ours = load_weights(tensors, config, kept=kept, interleaved=True, **options)
    theirs = load(meant, dtype=torch.bfloat16, fused=True)
    kinds = set()
    for one, other in zip(weight_list(ours), weight_list(theirs), strict=True):
        kinds.add(type(one))
        assert torch.equal(plain(one).flatten(), plain(other).flatten())
    assert kinds == {torch.Tensor, ScaledWeight}


def test_an_engine_says_what_transformers_says(tmp_path: Path) -> None:
    stored, meant = quantized(checkpoint("nemotron-h"), WAYS["modelopt"], tmp_path)
    prompts = random_prompts(4, 5, 60)
    with tiny_engine(stored, max_num_batched_tokens=512) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert ids_of(outputs) == reference_greedy(meant, prompts, 12)
