"""Gemma 4's language model inside a checkpoint that also sees and hears: the logits that transformers makes of it."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Gemma4Config

from checkpoints import checkpoint, greedy, random_prompts, randomize, tokenizer
from families import FAMILIES, SHAPE
from loaded_weights import load, weight_list
from paged_sequences import CPU, Sequences, make_decoder
from tercet.model.load import open_for
from tercet.triton_kernels.widen import plain
from whole_engine import GREEDY, NUM_TOKENS, generate, tiny_engine

_EYES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 840,
    "use_clipped_linears": True,
}
_EARS: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [4, 4],
    "output_proj_dims": 16,
}


def test_keys_and_values_that_nobody_reads_are_left_in_the_file(tmp_path: Path) -> None:
    """Public files have them for layers that borrow those of others."""
    tensors = load_file(checkpoint("gemma4-told") / "model.safetensors")
    assert "model.layers.3.self_attn.k_proj.weight" not in tensors
    names = ("k_proj", "v_proj", "k_norm")
    own = {name: tensors[f"model.layers.1.self_attn.{name}.weight"] for name in names}
    more = {f"model.layers.3.self_attn.{name}.weight": tensor.clone() for name, tensor in own.items()}
    save_file(tensors | more, tmp_path / "model.safetensors")
    shutil.copy(checkpoint("gemma4-told") / "config.json", tmp_path)
    for ours, theirs in zip(weight_list(load(tmp_path)), weight_list(load(checkpoint("gemma4-told"))), strict=True):
        assert torch.equal(plain(ours), plain(theirs))
    surplus = {"model.layers.0.self_attn.v_norm.weight": own["k_norm"].clone()}
    save_file(tensors | surplus, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"not part of this model: .*v_norm"):
        load(tmp_path)


def whole_of(family: str, folder: Path) -> Any:
    """A folder as from the hub, and what transformers makes of it."""
    kind, settings = FAMILIES[family]
    text = kind(**{**SHAPE, **settings})
    config = Gemma4Config(text_config=text.to_dict(), vision_config=_EYES, audio_config=_EARS)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomize(whole, torch.Generator().manual_seed(3))
    whole.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return whole


@pytest.mark.long
def test_an_engine_says_what_the_whole_does(tmp_path: Path) -> None:
    """To words."""
    whole, prompts = whole_of("gemma4-told", tmp_path), random_prompts(6, 3, 60, seed=2)
    answers = greedy(whole, prompts, NUM_TOKENS)
    assert len(set(map(tuple, answers))) == len(answers)
    with tiny_engine(tmp_path, limit_mm_per_prompt={"image": 0}) as llm:
        assert generate(llm, prompts, GREEDY) == answers


@pytest.mark.parametrize("family", ["gemma4", "gemma4-moe", "gemma4-told"])
def test_logits_are_those_of_the_whole(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, settings = whole_of(family, tmp_path), FAMILIES[family][1]
    with caplog.at_level(logging.WARNING):
        assert open_for(tmp_path, CPU, sees=True).vision is not None
    assert "only the language model is served" not in caplog.text
    (ids,) = random_prompts(1, 40, 40, seed=9)
    with torch.inference_mode():
        wanted = whole(input_ids=torch.tensor([ids])).logits[0, -4:]
    assert wanted.abs().max() < settings["final_logit_softcapping"]
    run = Sequences(make_decoder(tmp_path), 1)
    got = [run.step({}, {0: ids[:-3]})[0], *(run.step({0: token}, {})[0] for token in ids[-3:])]
    torch.testing.assert_close(torch.stack(got), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
