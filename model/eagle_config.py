"""What a checkpoint's config.json says whose one layer guesses tokens for another model (EAGLE-3).

It comes in two layouts: as those write it who trained the first ones, and in that of vLLM's speculators. Knows no
tensors; what else has to fit the model, it checks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tercet.model.config import ModelConfig
from tercet.model.config_fields import flag, positive
from tercet.model.config_json import parse_config

_OWN = (
    *("draft_vocab_size", "eagle_config", "target_hidden_size", "norm_before_residual", "modules_to_not_save"),
    *("eagle_aux_hidden_state_layer_ids", "target_model_type", "parallel_drafting", "max_window_layers"),
)
"""Fields of either layout beside those of the layer."""


@dataclass(frozen=True)
class EagleConfig:
    """Of one that fits a model."""

    layer: ModelConfig
    """Its vocabulary is the one that it guesses of."""
    hears: tuple[int, ...]
    """The model's layers ahead of which it hears the stream."""
    begins_normed: bool
    vocab_size: int
    """The model's."""


def parse_eagle(raw: Mapping[str, Any], model: ModelConfig) -> EagleConfig:
    """ValueError names the field that is missing, wrong, not supported, or does not fit the model."""
    fields = dict(raw)
    if "transformer_layer_config" in raw:
        if (kind := raw.get("speculators_model_type")) != "eagle3":
            raise ValueError(f"config.json: speculators_model_type is {kind!r}; want 'eagle3'")
        inner = raw["transformer_layer_config"]
        if not isinstance(inner, Mapping):
            raise ValueError(f"config.json: transformer_layer_config is {inner!r}; want an object")
        own = {name: raw[name] for name in _OWN if name in raw}
        fields = {**inner, **own, "norm_before_residual": raw.get("norm_before_residual", True)}
    if fields.get("model_type", "llama") != "llama":
        raise ValueError(f"config.json: model_type is {fields['model_type']!r}; supported for eagle3: 'llama'")
    if not fields.get("draft_vocab_size"):
        raise ValueError("config.json: draft_vocab_size is missing; want a checkpoint of method eagle3")
    vocab_size = positive(fields, "draft_vocab_size")
    plain = {name: value for name, value in fields.items() if name not in _OWN}
    layer = parse_config({**plain, "architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    layer = replace(layer, vocab_size=vocab_size, tie_word_embeddings=False, generates=True, joins=True)
    _check_fits(layer, fields, model)
    return EagleConfig(layer, _heard(fields, model), flag(fields, "norm_before_residual"), model.vocab_size)


def _check_fits(layer: ModelConfig, fields: Mapping[str, Any], model: ModelConfig) -> None:
    """Sizes that the model and its cache have."""
    if model.latent is not None:
        raise ValueError(f"models of family {model.family} cache latents, where eagle3 would have keys and values")
    sizes = {
        "num_hidden_layers": (layer.num_layers, 1),
        "hidden_size": (layer.hidden_size, model.hidden_size),
        "target_hidden_size": (fields.get("target_hidden_size") or model.hidden_size, model.hidden_size),
        "num_key_value_heads": (layer.num_kv_heads, model.num_kv_heads),
        "head_dim": (layer.head_dim, model.head_dim),
        "vocab_size": (fields.get("vocab_size", model.vocab_size), model.vocab_size),
    }
    for name, (given, wanted) in sizes.items():
        if given != wanted:
            why = "one layer" if name == "num_hidden_layers" else "as the model's"
            raise ValueError(f"config.json: {name} is {given}; want {wanted}, {why}")
    if layer.vocab_size > model.vocab_size:
        raise ValueError(f"config.json: draft_vocab_size is {layer.vocab_size}; want {model.vocab_size} at most")


def _heard(fields: Mapping[str, Any], model: ModelConfig) -> tuple[int, ...]:
    """As the file has them; else ahead of the third layer, of the one in the middle, and of the last but two."""
    settings = fields.get("eagle_config") or {}
    listed = fields.get("eagle_aux_hidden_state_layer_ids") or settings.get("eagle_aux_hidden_state_layer_ids")
    if not settings.get("use_aux_hidden_state", True):
        raise ValueError("config.json: eagle_config.use_aux_hidden_state is false; supported: true")
    count = model.num_layers
    layers = listed or [2, count // 2, count - 3]
    known = isinstance(layers, list) and all(type(one) is int and 0 <= one < count for one in layers)
    if not known or len(layers) != 3 or sorted(set(layers)) != layers:
        raise ValueError(f"eagle_aux_hidden_state_layer_ids is {layers!r}; want three of {count} layers, in order")
    return tuple(layers)
