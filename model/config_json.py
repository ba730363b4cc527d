"""From a checkpoint's `config.json` to a ModelConfig.

A field that would change the result and is not supported is refused by name, so that no model ever runs wrong
without a word. Fields that transformers does not read for a family either are named in the log.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tercet.model.config import DTYPES, ModelConfig
from tercet.model.rope import parse_rope

log = logging.getLogger(__name__)

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# What transformers assumes where config.json is silent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "vocab_size": 32000},
    "mistral": {
        "max_position_embeddings": 131072,
        "vocab_size": 32000,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": {
        "max_position_embeddings": 32768,
        "vocab_size": 151936,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3": {
        "max_position_embeddings": 32768,
        "vocab_size": 151936,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
}
_TELLING_NULLS = ("sliding_window", "num_key_value_heads")
"""Where null is a choice and not silence: no window, and as many as attention heads."""

# Fields that change the result in models near ours, with the values that leave it alone.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": (None, "silu", "swish"),
    "quantization_config": (None,),
    "compression_config": (None,),
    "per_layer_config": (None, {}),
    "attn_logit_softcapping": (None, 0, 0.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "clip_qkv": (None,),
    "rope_interleaved": (None, False),
    "use_mrope": (None, False),
    "no_rope_layers": (None, []),
    "no_rope_layer_interval": (None, 0),
    "attn_temperature_tuning": (None, False, 0),
    "llama_4_scaling": (None,),
    "alibi": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "pruned_heads": (None, {}),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "parallel_attn": (None, False),
    "norm_type": (None, "rms_norm"),
}

# Known to say nothing about the numbers of a forward pass. `pretraining_tp` only cuts a product into slices.
_HARMLESS = frozenset(
    {
        "architectures",
        "model_type",
        "transformers_version",
        "_name_or_path",
        "torch_dtype",
        "dtype",
        "use_cache",
        "initializer_range",
        "attention_dropout",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "pretraining_tp",
        "is_llama_config",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "chunk_size_feed_forward",
        "id2label",
        "label2id",
        "problem_type",
    }
)

# Fields above that transformers does not read for a family, with the values that say nothing there.
_UNREAD: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {"sliding_window": (None,), "use_sliding_window": (None, False)},
    "mistral": {
        "use_sliding_window": (None, True),
        "max_window_layers": (None, 0),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
    },
    "qwen2": {"attention_bias": (None, False), "mlp_bias": (None, False)},
    "qwen3": {"mlp_bias": (None, False)},
}


def read_config_json(folder: Path) -> dict[str, Any]:
    """The folder's config.json as it is."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} has no config.json; want a model folder") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not readable as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}; want an object")
    return raw


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Make a ModelConfig of a config.json; ValueError names the field that is missing, wrong or not supported."""
    family = _family(raw)
    config = {**_DEFAULTS[family], **{k: v for k, v in raw.items() if v is not None or k in _TELLING_NULLS}}
    for name, allowed in _ONLY.items():
        if name in config and config[name] not in allowed:
            wanted = ", ".join(repr(value) for value in allowed if value is not None) or "none"
            raise ValueError(
                f"config.json: {name} is {config[name]!r}, which would change the result; supported: {wanted}"
            )
    unread = {name for name, silent in _UNREAD[family].items() if config.get(name) not in silent}
    if unused := sorted((set(config) - set(_ONLY) - _HARMLESS) | unread):
        log.warning("config.json: fields without meaning for %s, which are not used: %s", family, ", ".join(unused))
    num_heads = _positive(config, "num_attention_heads")
    hidden_size = _positive(config, "hidden_size")
    if "head_dim" not in config and hidden_size % num_heads:
        raise ValueError(
            f"config.json: hidden_size is {hidden_size}; want a multiple of num_attention_heads ({num_heads})"
        )
    eps = config.get("rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < 1:
        raise ValueError(f"config.json: rms_norm_eps is {eps!r}; want a small positive number")
    max_positions = _positive(config, "max_position_embeddings")
    attention_bias = family != "mistral" and _flag(config, "attention_bias")
    return ModelConfig(
        family=family,
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size"),
        num_layers=_positive(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_positive(config, "num_key_value_heads", num_heads),
        head_dim=_positive(config, "head_dim", hidden_size // num_heads),
        rms_norm_eps=float(eps),
        rope=parse_rope(config),
        max_position_embeddings=max_positions,
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family != "qwen2" and attention_bias,
        mlp_bias=family == "llama" and _flag(config, "mlp_bias"),
        qk_norm=family == "qwen3",
        layer_windows=_windows(config, family),
        dtype=_dtype(config),
    )


def _family(raw: Mapping[str, Any]) -> str:
    architectures = raw.get("architectures")
    supported = ", ".join(FAMILIES)
    if not isinstance(architectures, list) or len(architectures) != 1 or str(architectures[0]) not in FAMILIES:
        raise ValueError(f"config.json: architectures is {architectures!r}; supported: one of {supported}")
    family = FAMILIES[architectures[0]]
    if raw.get("model_type", family) != family:
        raise ValueError(f"config.json: model_type is {raw['model_type']!r}; {architectures[0]} wants {family!r}")
    return family


def _windows(config: Mapping[str, Any], family: str) -> tuple[int, ...]:
    num_layers = int(config["num_hidden_layers"])
    window = config.get("sliding_window")
    if family == "llama" or (family != "mistral" and not _flag(config, "use_sliding_window")):
        window = None
    if window is not None:
        window = _positive(config, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        first = 0 if family == "mistral" else _first_windowed(config)
        return tuple(window if window and layer >= first else 0 for layer in range(num_layers))
    known = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(str(kind) not in known for kind in kinds):
        raise ValueError(f"config.json: layer_types is {kinds!r}; supported: one of {', '.join(known)} for each layer")
    if family in ("llama", "mistral"):
        # These ignore layer_types in transformers: all layers follow sliding_window.
        expected = "sliding_attention" if window else "full_attention"
        if set(kinds) != {expected}:
            raise ValueError(f"config.json: layer_types is {kinds!r}; supported for {family}: {expected} throughout")
    if "sliding_attention" in kinds and window is None:
        raise ValueError("config.json: layer_types asks for sliding_attention, but sliding_window is not in use")
    return tuple(known[kind] or 0 for kind in kinds)


def _first_windowed(config: Mapping[str, Any]) -> int:
    first = config.get("max_window_layers", 0)
    if isinstance(first, bool) or not isinstance(first, int):
        raise ValueError(f"config.json: max_window_layers is {first!r}; want a whole number")
    return first


def _dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    given = config.get("dtype") or config.get("torch_dtype")
    if given is None:
        return None
    name = str(given).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"config.json: dtype is {name!r}; supported: {', '.join(DTYPES)}")
    return DTYPES[name]


def _positive(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    given = config.get(name)
    value = default if given is None else given
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"config.json: {name} is {value!r}; want a positive whole number")
    return value


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {name} is {value!r}; want true or false")
    return value
