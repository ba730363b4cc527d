"""The language model inside a checkpoint that can also see: its part of config.json, and its tensors by usual names.

What looks at images is not read, and no request can bring any. Knows names; reads nothing itself.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tercet.model.safetensors_files import SafetensorsCheckpoint

log = logging.getLogger(__name__)

# Architecture and model_type of the whole, then of what it speaks with.
WHOLES = {
    "Gemma3ForConditionalGeneration": ("gemma3", "Gemma3ForCausalLM", "gemma3_text"),
    "Mistral3ForConditionalGeneration": ("mistral3", "MistralForCausalLM", "mistral"),
}
_OF_IMAGES = ("vision_tower.", "multi_modal_projector.")


def has_text_part(raw: Mapping[str, Any]) -> bool:
    """Whether this config.json is of a checkpoint of which only the language model is served."""
    return raw.get("architectures") in [[name] for name in WHOLES]


def text_part_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What this config.json says of the language model, as if that were alone."""
    (architecture,) = raw["architectures"]
    whole_type, text_architecture, text_type = WHOLES[architecture]
    if raw.get("model_type", whole_type) != whole_type:
        raise ValueError(f"config.json: model_type is {raw['model_type']!r}; {architecture} wants {whole_type!r}")
    text = raw.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type", text_type) != text_type:
        raise ValueError(f"config.json: text_config is {text!r}; {architecture} wants one of model_type {text_type!r}")
    if text.get("final_logit_softcapping") is not None:  # transformers caps those of the language model alone
        raise ValueError(
            f"config.json: final_logit_softcapping is {text['final_logit_softcapping']!r}; supported for "
            f"{architecture}: none"
        )
    log.warning("config.json: of %s only the language model is served; what looks at images is left out", architecture)
    # Said of the whole: the type of all weights, and whether words have one matrix.
    shared = {name: raw[name] for name in ("dtype", "torch_dtype", "tie_word_embeddings") if raw.get(name) is not None}
    return {**text, **shared, "architectures": [text_architecture], "model_type": text_type}


class TextPart:
    """As the `Checkpoint` that it is made of, without what looks at images, and by the names of a language model."""

    def __init__(self, whole: SafetensorsCheckpoint) -> None:
        self.source = whole.source
        self._whole = whole
        names = ((_alone(name), name) for name in whole.shapes())
        self._names = {alone: name for alone, name in names if alone is not None}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = self._whole.shapes()
        return {alone: shapes[name] for alone, name in self._names.items()}

    def dtype_of(self, name: str) -> torch.dtype | None:
        """The type that a tensor is stored in; None if there is no such tensor."""
        return self._whole.dtype_of(self._names[name]) if name in self._names else None

    def read(self, name: str, dim: int, start: int, stop: int) -> Iterator[Tensor]:
        return self._whole.read(self._names[name], dim, start, stop)


def _alone(name: str) -> str | None:
    """A tensor's name in a language model; None: it is not of one. Versions of transformers write two kinds."""
    if name.startswith("language_model."):
        return name.removeprefix("language_model.")
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return None if name.removeprefix("model.").startswith(_OF_IMAGES) else name
