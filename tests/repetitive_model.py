"""A tiny checkpoint that goes around in circles most of the time, so that what it says next can be guessed."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint
from families import VOCAB_SIZE

FAMILY = "llama3"
QUIET = 0.0003
"""Where norms are louder, as in models with states."""
CYCLE = 9
"""Tokens after which it says the same again, unless its layers have another idea."""


@functools.cache
def repetitive(loudness: float = 0.002, family: str = FAMILY, **overrides: Any) -> Path:
    """Its head wants one token after the other; its layers say little against it. `overrides`: of its config.json."""
    folder = Path(tempfile.mkdtemp(prefix="tercet-repetitive-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = make_checkpoint(family, folder, **overrides) / "model.safetensors"
    tensors = load_file(path)
    ids = torch.arange(VOCAB_SIZE)
    following = torch.where(ids % CYCLE == CYCLE - 1, ids - CYCLE + 1, (ids + 1).clamp(max=VOCAB_SIZE - 1))
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = torch.zeros_like(embedding).index_copy_(0, following, embedding) * 3
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight", "output_linear.weight")):
            tensors[name] *= loudness
        elif name.endswith(".out_proj.weight"):  # where there are states, what follows depends on them
            tensors[name] *= 20 * loudness
    save_file(tensors, path, {"format": "pt"})
    return folder
