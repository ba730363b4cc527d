"""Gemma 4's language model inside a checkpoint that also sees and hears: the logits that transformers makes of it."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, Gemma4Config

from checkpoints import random_prompts, randomize
from families import FAMILIES, SHAPE
from paged_sequences import CPU, Sequences, make_decoder
from tercet.model.load import open_for

_EYES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 16,
}
_EARS: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [4, 4],
    "output_proj_dims": 16,
}


@pytest.mark.parametrize("family", ["gemma4", "gemma4-moe", "gemma4-told"])
def test_logits_are_those_of_the_whole(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kind, settings = FAMILIES[family]
    text = kind(**{**SHAPE, **settings})
    config = Gemma4Config(text_config=text.to_dict(), vision_config=_EYES, audio_config=_EARS)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomize(whole, torch.Generator().manual_seed(3))
    whole.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert open_for(tmp_path, CPU, sees=True).vision is None
    assert "only the language model is served" in caplog.text
    (ids,) = random_prompts(1, 40, 40, seed=9)
    with torch.inference_mode():
        wanted = whole(input_ids=torch.tensor([ids])).logits[0, -4:]
    assert wanted.abs().max() < settings["final_logit_softcapping"]
    run = Sequences(make_decoder(tmp_path), 1)
    got = [run.step({}, {0: ids[:-3]})[0], *(run.step({0: token}, {})[0] for token in ids[-3:])]
    torch.testing.assert_close(torch.stack(got), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
