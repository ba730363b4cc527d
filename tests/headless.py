"""Tiny random checkpoints without what makes logits."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel

from checkpoints import randomize
from families import FAMILIES, SHAPE


def headless(family: str, folder: Path, seed: int) -> Any:
    """As `AutoModel` saves it: names begin otherwise, and config.json names another class."""
    kind, settings = FAMILIES[family]
    config = kind(**{**SHAPE, **settings, "tie_word_embeddings": False, "final_logit_softcapping": None})
    model = AutoModel.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomize(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)
    return model
