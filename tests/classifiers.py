"""Tiny random checkpoints with a head that classifies, and what transformers makes of prompts with it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForSequenceClassification

from checkpoints import randomize, tokenizer
from families import FAMILIES, SHAPE


def classifier(family: str, folder: Path, seed: int, **settings: Any) -> Any:
    """A folder as transformers saves it, with a tokenizer; `settings` go into its config.json."""
    kind, own = FAMILIES[family]
    config = kind(**{**SHAPE, **own, **settings})
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, attn_implementation="eager")
    randomize(model, torch.Generator().manual_seed(seed))
    model.eval().save_pretrained(folder)
    tokenizer(config.vocab_size).save_pretrained(folder)
    return model


def reference_logits(model: Any, prompts: list[list[int]]) -> list[NDArray[np.float32]]:
    """Of each prompt, without padding."""
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0].numpy() for prompt in prompts]
