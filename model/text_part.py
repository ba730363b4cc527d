"""The language model inside a checkpoint that can also see: its part of config.json, and its tensors by usual names.

What looks at images is read elsewhere (`vision.py`). Knows names; reads nothing itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tercet.model.config_latents import share_of_head
from tercet.model.config_positions import with_plain_positions
from tercet.model.renamed import Renamed
from tercet.model.weights import Files

_OF_IMAGES = ("vision_tower.", "multi_modal_projector.", "visual.")
_GEMMA4S = ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.")


@dataclass(frozen=True)
class _Language:
    """What a whole calls its language model, and what serves that: an architecture and a model_type. What transformers
    assumes of it where config.json is silent, unless it is what it always assumes; and what it has whatever is said.
    `divides`: its heads are equal parts of hidden states."""

    text_type: str
    architecture: str
    served_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    divides: bool = False


@dataclass(frozen=True)
class _Whole:
    """Its model_type, and the language models that may be inside: the first where config.json does not say which.
    `flat`: the first files say all of it on one level; `caps`: transformers caps the whole's logits as those of the
    language model alone."""

    model_type: str
    languages: tuple[_Language, ...]
    flat: bool = False
    caps: bool = False
    others: tuple[str, ...] = _OF_IMAGES
    """What names of tensors that look or listen begin with."""


_QWEN2_VL = {
    "vocab_size": 152064,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "max_window_layers": 80,
}
_QWEN3_VL = {"num_key_value_heads": 32, "rope_theta": 500_000.0, "max_position_embeddings": 128_000}
_QWEN3_VL_MOE = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 128_000,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
}
_GLM4V = _Language(
    "glm4v_text",
    "Glm4ForCausalLM",
    "glm4",
    {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
    {"attention_bias": True},
    divides=True,
)
_GLM4V_MOE = _Language(
    "glm4v_moe_text",
    "Glm4MoeForCausalLM",
    "glm4_moe",
    {"max_position_embeddings": 65536, "vocab_size": 151424, "attention_bias": True},
    {"use_qk_norm": False},
)


def _alone_as(architecture: str, kind: str) -> _Language:
    """One that is called as it would be without a whole around it."""
    return _Language(kind, architecture, kind)


WHOLES = {
    "Gemma3ForConditionalGeneration": _Whole("gemma3", (_alone_as("Gemma3ForCausalLM", "gemma3_text"),)),
    "Gemma4ForConditionalGeneration": _Whole(
        "gemma4", (_alone_as("Gemma4ForCausalLM", "gemma4_text"),), caps=True, others=_GEMMA4S
    ),
    "Glm4vForConditionalGeneration": _Whole("glm4v", (_GLM4V,)),
    "Glm46VForConditionalGeneration": _Whole("glm46v", (_GLM4V, _GLM4V_MOE)),
    "Glm4vMoeForConditionalGeneration": _Whole("glm4v_moe", (_GLM4V_MOE,)),
    "InternVLForConditionalGeneration": _Whole(
        "internvl",
        (
            _alone_as("Qwen2ForCausalLM", "qwen2"),
            _alone_as("GptOssForCausalLM", "gpt_oss"),
            _alone_as("LlamaForCausalLM", "llama"),
            _alone_as("Qwen3ForCausalLM", "qwen3"),
            _alone_as("Qwen3MoeForCausalLM", "qwen3_moe"),
        ),
    ),
    "Mistral3ForConditionalGeneration": _Whole(
        "mistral3",
        (
            _alone_as("MistralForCausalLM", "mistral"),
            _alone_as("Ministral3ForCausalLM", "ministral3"),
            _alone_as("Mistral4ForCausalLM", "mistral4"),
        ),
    ),
    "Qwen2VLForConditionalGeneration": _Whole(
        "qwen2_vl", (_Language("qwen2_vl_text", "Qwen2ForCausalLM", "qwen2", _QWEN2_VL),), flat=True
    ),
    "Qwen2_5_VLForConditionalGeneration": _Whole(
        "qwen2_5_vl", (_Language("qwen2_5_vl_text", "Qwen2ForCausalLM", "qwen2", _QWEN2_VL),), flat=True
    ),
    "Qwen3VLForConditionalGeneration": _Whole(
        "qwen3_vl", (_Language("qwen3_vl_text", "Qwen3ForCausalLM", "qwen3", _QWEN3_VL),)
    ),
    "Qwen3VLMoeForConditionalGeneration": _Whole(
        "qwen3_vl_moe", (_Language("qwen3_vl_moe_text", "Qwen3MoeForCausalLM", "qwen3_moe", _QWEN3_VL_MOE),)
    ),
    "Qwen3_5ForConditionalGeneration": _Whole("qwen3_5", (_alone_as("Qwen3_5ForCausalLM", "qwen3_5_text"),)),
    "Qwen3_5MoeForConditionalGeneration": _Whole(
        "qwen3_5_moe", (_alone_as("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),)
    ),
}
_ABOUT_IMAGES = frozenset(
    {
        "vision_config",
        "vision_start_token_id",
        "vision_end_token_id",
        "vision_token_id",
        "image_token_id",
        "image_start_token_id",
        "image_end_token_id",
        "video_token_id",
        "video_start_token_id",
        "video_end_token_id",
    }
)


def has_text_part(raw: Mapping[str, Any]) -> bool:
    """Whether this config.json is of a checkpoint of which only the language model is served."""
    return raw.get("architectures") in [[name] for name in WHOLES]


def text_part_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What this config.json says of the language model, as if that were alone."""
    (architecture,) = raw["architectures"]
    whole = WHOLES[architecture]
    if raw.get("model_type", whole.model_type) != whole.model_type:
        raise ValueError(f"config.json: model_type is {raw['model_type']!r}; {architecture} wants {whole.model_type!r}")
    text = raw.get("text_config")
    if whole.flat and text is None:
        text = {**raw, "model_type": None}
    kind = (text.get("model_type") or whole.languages[0].text_type) if isinstance(text, Mapping) else None
    language = next((one for one in whole.languages if one.text_type == kind), None)
    if not isinstance(text, Mapping) or language is None:
        wanted = " or ".join(repr(one.text_type) for one in whole.languages)
        raise ValueError(f"config.json: text_config is {text!r}; {architecture} wants one of model_type {wanted}")
    if not whole.caps and text.get("final_logit_softcapping") is not None:
        raise ValueError(
            f"config.json: final_logit_softcapping is {text['final_logit_softcapping']!r}; supported for "
            f"{architecture}: none"
        )
    # Said of the whole: the type of all weights, and whether words have one matrix.
    shared = {name: raw[name] for name in ("dtype", "torch_dtype", "tie_word_embeddings") if raw.get(name) is not None}
    if language.defaults and text.get("tie_word_embeddings"):
        shared["tie_word_embeddings"] = True
    alone = {**language.defaults, **text, **shared, **language.always}
    if language.divides:
        alone["head_dim"] = _divided(alone)
    alone |= {"architectures": [language.architecture], "model_type": language.served_type}
    return with_plain_positions({name: value for name, value in alone.items() if name not in _ABOUT_IMAGES})


def _divided(config: Mapping[str, Any]) -> int:
    """How many numbers a head has, of hidden states that heads share."""
    size, said = share_of_head(config), config.get("head_dim")
    if said not in (None, size):
        raise ValueError(f"config.json: head_dim is {said!r}; want {size}, hidden_size by num_attention_heads")
    return size


def text_tensors(raw: Mapping[str, Any], whole: Files) -> Files:
    """Without what looks at images or listens, and by the names of a language model. `raw`: the config.json."""
    others = WHOLES[raw["architectures"][0]].others
    names = ((_alone(name, others), name) for name in whole.shapes())
    return Renamed(whole, {alone: name for alone, name in names if alone is not None})


def _alone(name: str, others: tuple[str, ...]) -> str | None:
    """A tensor's name in a language model; None: it is not of one. Versions of transformers write two kinds."""
    if name.startswith("language_model."):
        return name.removeprefix("language_model.")
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return None if name.removeprefix("model.").startswith(others) else name
