"""From a checkpoint's `config.json` to a ModelConfig.

A field that would change the result and is not supported is refused by name, so that no model ever runs wrong
without a word. Fields that transformers does not read for a family either are named in the log.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tercet.model.classifier_config import classifier_of
from tercet.model.config import DTYPES, MOST_LAYERS, ModelConfig
from tercet.model.config_defaults import CLASSIFIERS, FAMILIES, HEADLESS, OTHER_NAMES, traits, with_defaults
from tercet.model.config_delta import delta
from tercet.model.config_experts import experts
from tercet.model.config_fields import check_fields, flag, number, positive
from tercet.model.config_gemma4 import GEMMA4, layer_heads, layer_inputs
from tercet.model.config_guesser import guesser
from tercet.model.config_latents import latent, size_of_head
from tercet.model.config_mamba import mamba
from tercet.model.config_nemotron import as_layers
from tercet.model.layer_types import FULL, layer_ropes, layer_windows, ropes_by_type
from tercet.model.text_part import WHOLES

_WITHOUT_BIAS = (
    *("mistral", "ministral", "ministral3", "mixtral", "phi3", "exaone4", "minimax_m2", "qwen2", "qwen2_moe"),
)
"""Families whose files may say attention_bias and mean nothing by it."""
_O_WITHOUT_BIAS = ("glm", "glm4", "glm4_moe")
"""Families whose files do not mean the output product by it."""
_MLP_BIASED = ("llama", "arcee", "smollm3", "granite", "seed_oss", "ernie4_5")
"""Families whose MLPs may have biases."""
_BIASES = dict.fromkeys(("ernie4_5", "ernie4_5_moe"), "use_bias")
"""Where one field says of all biases whether they are there."""


def read_config_json(folder: Path) -> dict[str, Any]:
    """The folder's config.json as it is; with what ModelOpt has written beside it of quantized weights, where it is
    silent."""
    try:
        raw = read_object(folder / "config.json")
    except FileNotFoundError:
        raise ValueError(f"{folder} has no config.json; want a model folder") from None
    if "quantization_config" not in raw and (file := folder / "hf_quant_config.json").exists():
        raw["quantization_config"] = _of_modelopt(file)
    return raw


def _of_modelopt(file: Path) -> dict[str, Any]:
    """As config.json would say it."""
    settings = read_object(file).get("quantization")
    if not isinstance(settings, dict):
        raise ValueError(f"{file}: quantization is {settings!r}; want an object")
    return {"quant_method": "modelopt", **settings}


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object. ValueError where there is no such thing in the file, FileNotFoundError where there is no file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}; want an object")
    return raw


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Make a ModelConfig of a config.json; ValueError names the field that is missing, wrong or not supported."""
    family = _family(raw)
    config = with_defaults(raw, family)
    check_fields(config, family)
    if family == "nemotron_h":
        config = as_layers(config)
    num_heads = positive(config, "num_attention_heads")
    hidden_size = positive(config, "hidden_size")
    latents = latent(config, family)
    if latents is None:
        head_dim, num_kv_heads = size_of_head(config), positive(config, "num_key_value_heads", num_heads)
    else:
        head_dim, num_kv_heads = latents.still + latents.turned, 1
    eps = config.get("rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < 1:
        raise ValueError(f"config.json: rms_norm_eps is {eps!r}; want a small positive number")
    max_positions = positive(config, "max_position_embeddings")
    attention_bias = family not in _WITHOUT_BIAS and flag(config, _BIASES.get(family, "attention_bias"))
    num_layers = positive(config, "num_hidden_layers", most=MOST_LAYERS)
    ropes = ropes_by_type(config, family)
    rope = ropes[FULL]
    if family == "gemma3_text" and rope.kind == "linear":
        max_positions = int(max_positions / rope.factor)  # theirs is the scaled length
    tied = flag(config, "tie_word_embeddings")
    headless, classifies = (raw["architectures"][0] in names for names in (HEADLESS, CLASSIFIERS))
    known = traits(family)
    if family == "glm4_moe":
        known["qk_norm"] = flag(config, "use_qk_norm")
    of_embedding, of_blocks, of_logits = _multipliers(config, family)
    many, guessing_layers = experts(config, family), _guessing_layers(config)
    windows = layer_windows(config, family)
    return ModelConfig(
        **known,
        vocab_size=positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive(config, _size_of_mlp(family, many is not None)),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(eps),
        embedding_multiplier=of_embedding,
        residual_multiplier=of_blocks,
        logits_scaling=of_logits,
        attention_scale=_attention_scale(config, family, head_dim) * (1.0 if latents is None else rope.score_factor),
        attention_softcap=_cap(config, "attn_logit_softcapping"),
        logit_softcap=_cap(config, "final_logit_softcapping"),
        norm_shift=1.0 if known["float32_norms"] else 0.0,
        rope=rope,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied or headless or classifies,
        generates=not classifies and (tied or not headless),
        classifier=classifier_of(raw) if classifies else None,
        qkv_bias=flag(config, "qkv_bias") if family == "qwen2_moe" else family == "qwen2" or attention_bias,
        o_bias=flag(config, "attention_out_bias")
        if family == "seed_oss"
        else family not in _O_WITHOUT_BIAS and attention_bias,
        mlp_bias=family in _MLP_BIASED and flag(config, _BIASES.get(family, "mlp_bias")),
        latent=latents,
        carried=delta(config, family) or mamba(config, family),
        experts=many,
        bare_layers=frozenset(config.get("bare_layers", ())),
        wide_mlps=family == GEMMA4 and flag(config, "use_double_wide_mlp"),
        layer_inputs=layer_inputs(config, family),
        guessing_layers=guessing_layers,
        guesser=guesser(
            family, num_layers, guessing_layers, has_experts=many is not None and num_layers - 1 in many.layers
        ),
        layer_windows=windows,
        layer_heads=layer_heads(config, family, windows),
        layer_ropes=layer_ropes(config, family, ropes),
        dtype=_dtype(config),
    )


def _family(raw: Mapping[str, Any]) -> str:
    architectures = raw.get("architectures")
    by_name = FAMILIES | HEADLESS | CLASSIFIERS
    if architectures == ["InternVLChatModel"]:
        wanted = "the same model for transformers, as in OpenGVLab/InternVL3-8B-hf, whose name ends in -hf"
        raise ValueError(f"config.json: architectures is {architectures!r}, which has code of its own; want {wanted}")
    if not isinstance(architectures, list) or len(architectures) != 1 or str(architectures[0]) not in by_name:
        others = "without a head, such as Qwen3Model, or with one that classifies, as Qwen3ForSequenceClassification"
        supported = f"{', '.join((*FAMILIES, *WHOLES))}, or those {others}"
        raise ValueError(f"config.json: architectures is {architectures!r}; supported: one of {supported}")
    family = by_name[architectures[0]]
    given = raw.get("model_type", family)
    if given != family and (not isinstance(given, str) or OTHER_NAMES.get(given) != family):
        raise ValueError(f"config.json: model_type is {given!r}; {architectures[0]} wants {family!r}")
    return family


def _size_of_mlp(family: str, has_experts: bool) -> str:
    """The field that says it: Granite's hybrids have what all tokens share, and experts or not."""
    return "shared_intermediate_size" if family == "granitemoehybrid" and not has_experts else "intermediate_size"


def _multipliers(config: Mapping[str, Any], family: str) -> tuple[float, float, float]:
    """Of embeddings and of what blocks add to them; and what logits are divided by."""
    hidden_size = positive(config, "hidden_size")
    if family == "minicpm3":
        of_blocks, of_logits = 1.0, 1.0
        if config["scale_depth"] is not None:
            of_blocks = number(config, "scale_depth", 1.0) / math.sqrt(positive(config, "num_hidden_layers"))
        if config["dim_model_base"] is not None:
            of_logits = hidden_size / positive(config, "dim_model_base")
        return number(config, "scale_emb", 1.0), of_blocks, of_logits
    is_gemma = family in ("gemma2", "gemma3_text", GEMMA4)
    return (
        hidden_size**0.5 if is_gemma else number(config, "embedding_multiplier", 1.0),
        number(config, "residual_multiplier", 1.0),
        number(config, "logits_scaling", 1.0),
    )


def _attention_scale(config: Mapping[str, Any], family: str, head_dim: int) -> float:
    if family == GEMMA4:  # the norm of keys takes its place
        return 1.0
    if "query_pre_attn_scalar" in config:
        return float(number(config, "query_pre_attn_scalar", head_dim) ** -0.5)
    return number(config, "attention_multiplier", head_dim**-0.5)


def _guessing_layers(config: Mapping[str, Any]) -> int:
    names = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")
    return sum(positive(config, name) for name in names if config.get(name))


def _cap(config: Mapping[str, Any], name: str) -> float:
    return number(config, name, 0.0) if config.get(name) else 0.0


def _dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    given = config.get("dtype") or config.get("torch_dtype")
    if given is None:
        return None
    name = str(given).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"config.json: dtype is {name!r}; supported: {', '.join(DTYPES)}")
    return DTYPES[name]
