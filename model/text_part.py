"""The language model inside a checkpoint that can also see: its part of config.json, and its tensors by usual names.

What looks at images is read elsewhere (`vision.py`). Knows names; reads nothing itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tercet.model.renamed import Renamed
from tercet.model.rope import with_plain_positions
from tercet.model.weights import Files


@dataclass(frozen=True)
class _Whole:
    """Its model_type and its language model's, then what serves that: an architecture and a model_type. And what
    transformers assumes of this language model where config.json is silent, unless it is what it always assumes.
    Then, what it may have instead: by model_type, the architecture that serves it."""

    model_type: str
    text_type: str
    architecture: str
    served_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    caps: bool = False
    """transformers caps the whole's logits as the language model's."""
    other_tensors: tuple[str, ...] = ()
    """What names begin with of tensors that are no language model's, beside those that others have, too."""


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
_BESIDE_INTERNVIT = {
    "gpt_oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
WHOLES = {
    "Gemma3ForConditionalGeneration": _Whole("gemma3", "gemma3_text", "Gemma3ForCausalLM", "gemma3_text"),
    "Gemma4ForConditionalGeneration": _Whole(
        "gemma4",
        "gemma4_text",
        "Gemma4ForCausalLM",
        "gemma4_text",
        caps=True,
        other_tensors=("embed_vision.", "audio_tower.", "embed_audio."),
    ),
    "InternVLForConditionalGeneration": _Whole(
        "internvl", "qwen2", "Qwen2ForCausalLM", "qwen2", others=_BESIDE_INTERNVIT
    ),
    "Mistral3ForConditionalGeneration": _Whole("mistral3", "mistral", "MistralForCausalLM", "mistral"),
    "Qwen2VLForConditionalGeneration": _Whole("qwen2_vl", "qwen2_vl_text", "Qwen2ForCausalLM", "qwen2", _QWEN2_VL),
    "Qwen2_5_VLForConditionalGeneration": _Whole(
        "qwen2_5_vl", "qwen2_5_vl_text", "Qwen2ForCausalLM", "qwen2", _QWEN2_VL
    ),
    "Qwen3VLForConditionalGeneration": _Whole("qwen3_vl", "qwen3_vl_text", "Qwen3ForCausalLM", "qwen3", _QWEN3_VL),
    "Qwen3VLMoeForConditionalGeneration": _Whole(
        "qwen3_vl_moe", "qwen3_vl_moe_text", "Qwen3MoeForCausalLM", "qwen3_moe", _QWEN3_VL_MOE
    ),
    "Qwen3_5ForConditionalGeneration": _Whole("qwen3_5", "qwen3_5_text", "Qwen3_5ForCausalLM", "qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": _Whole(
        "qwen3_5_moe", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"
    ),
}
_OF_IMAGES = ("vision_tower.", "multi_modal_projector.", "visual.")
_ABOUT_IMAGES = frozenset(
    {
        "vision_config",
        "vision_start_token_id",
        "vision_end_token_id",
        "vision_token_id",
        "image_token_id",
        "video_token_id",
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
    if whole.defaults and text is None:  # the first files of Qwen's say all of it on one level
        text = {name: value for name, value in raw.items() if name not in _ABOUT_IMAGES} | {"model_type": None}
    kinds = {whole.text_type: (whole.architecture, whole.served_type)}
    kinds |= {kind: (serving, kind) for kind, serving in whole.others.items()}
    kind = (text.get("model_type") or whole.text_type) if isinstance(text, Mapping) else None
    if not isinstance(text, Mapping) or kind not in kinds:
        wanted = " or ".join(map(repr, kinds))
        raise ValueError(f"config.json: text_config is {text!r}; {architecture} wants one of model_type {wanted}")
    if not whole.caps and text.get("final_logit_softcapping") is not None:
        raise ValueError(
            f"config.json: final_logit_softcapping is {text['final_logit_softcapping']!r}; supported for "
            f"{architecture}: none"
        )
    # Said of the whole: the type of all weights, and whether words have one matrix.
    shared = {name: raw[name] for name in ("dtype", "torch_dtype", "tie_word_embeddings") if raw.get(name) is not None}
    if whole.defaults and text.get("tie_word_embeddings"):
        shared["tie_word_embeddings"] = True
    serving, served_type = kinds[kind]
    alone = {**whole.defaults, **text, **shared, "architectures": [serving], "model_type": served_type}
    return with_plain_positions(alone)


def text_tensors(whole: Files, raw: Mapping[str, Any]) -> Files:
    """Without what looks at images or listens, and by the names of a language model. `raw`: its config.json."""
    (architecture,) = raw["architectures"]
    others = _OF_IMAGES + WHOLES[architecture].other_tensors
    names = ((_alone(name, others), name) for name in whole.shapes())
    return Renamed(whole, {alone: name for alone, name in names if alone is not None})


def _alone(name: str, others: tuple[str, ...]) -> str | None:
    """A tensor's name in a language model; None: it is one of `others`. Versions of transformers write two kinds."""
    if name.startswith("language_model."):
        return name.removeprefix("language_model.")
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return None if name.removeprefix("model.").startswith(others) else name
