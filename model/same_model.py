"""Whether a checkpoint has other weights of a model, or is another model. Knows no tensor but by its type."""

from dataclasses import fields
from pathlib import Path

from tercet.model.checkpoint import open_model, read_config
from tercet.model.config import ModelConfig

_MAY_DIFFER = {"dtype"}
"""Weights are read as whatever type the model's first were."""


def check_same(path: Path, like: Path, *, has_weights: bool) -> ModelConfig:
    """The configuration of the model `like`; where that does not say of which type its weights are and there are some,
    they do. ValueError names where the configuration of the checkpoint at `path` is another."""
    config, first = read_config(path), read_config(like)
    for field in fields(config):
        got, wanted = getattr(config, field.name), getattr(first, field.name)
        if got != wanted and field.name not in _MAY_DIFFER:
            raise ValueError(
                f"{path}: {field.name} of its configuration is {got!r:.100}; want {wanted!r:.100}, as of {like}"
            )
    return open_model(like)[0] if has_weights and first.dtype is None else first
