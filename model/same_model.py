"""Whether a checkpoint has other weights of a model, or is another model. Knows no tensor."""

from dataclasses import fields
from pathlib import Path

from tercet.model.checkpoint import open_model, read_config
from tercet.model.config import DTYPES

_MAY_DIFFER = {"dtype"}
"""Weights are read as whatever type the model's first were."""


def same_model(path: Path, like: Path, dtype: str) -> str:
    """The type that was meant by `dtype` for the model `like`. ValueError names where that at `path` is another."""
    config, first = read_config(path), read_config(like)
    if dtype == "auto" and first.dtype is None:
        first, _ = open_model(like)  # its tensors know
    for field in fields(config):
        got, wanted = getattr(config, field.name), getattr(first, field.name)
        if got != wanted and field.name not in _MAY_DIFFER:
            raise ValueError(
                f"{path}: {field.name} of its configuration is {got!r:.100}; want {wanted!r:.100}, as of {like}"
            )
    named = [name for name, kind in DTYPES.items() if kind is first.dtype]
    return named[0] if dtype == "auto" and named else dtype
