"""Public model shapes as config.json contents, so that speed can be measured with random weights and no download.

`write_shape(name, folder)` makes a folder that `--load-format dummy` can serve, with a tokenizer of made-up words, so
that turning ids into text costs what it costs.
"""

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import shapes_delta
import shapes_gemma4
import shapes_mamba
import shapes_vision


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool = False) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": 40960,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    }


def _llama(hidden: int, intermediate: int, layers: int, head_dim: int, *, tied: bool = False) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 32.0 if tied else 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    }


def _experts(dense: dict[str, Any], **experts: int | bool) -> dict[str, Any]:
    """The same with many MLPs in each layer."""
    return {**dense, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **experts}


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    """Experts in MXFP4."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "eos_token_id": 200002,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_local_experts": experts,
        "pad_token_id": 199999,
        "quantization_config": {"quant_method": "mxfp4"},
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 201088,
    }


def _latents(family: str, hidden: int, intermediate: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    """Many MLPs in all layers but the first, and attention that reads latents."""
    architectures = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "glm4_moe_lite": "Glm4MoeLite"}
    return {
        "architectures": [f"{architectures[family]}ForCausalLM"],
        "model_type": family,
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "kv_lora_rank": 512,
        "n_group": 1,
        "n_routed_experts": 64,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": heads,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        **more,
    }


def _fp8(plain: dict[str, Any]) -> dict[str, Any]:
    """The same with a scale for each block of its projections' numbers."""
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return {**plain, "quantization_config": blocks}


def _awq(plain: dict[str, Any]) -> dict[str, Any]:
    """The same with its projections' numbers in four bits, and a scale and a zero for each 128 columns."""
    groups = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    return {**plain, "quantization_config": groups}


_30B_A3B = _experts(
    {**_qwen3(2048, 6144, 48, 32), "num_key_value_heads": 4},
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
)
_DEEPSEEK_V2_LITE = _latents(
    *("deepseek_v2", 2048, 10944, 27, 16),
    bos_token_id=100000,
    eos_token_id=100001,
    max_position_embeddings=163840,
    moe_intermediate_size=1408,
    n_shared_experts=2,
    norm_topk_prob=False,
    num_experts_per_tok=6,
    rms_norm_eps=1e-6,
    rope_scaling={
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    rope_theta=10000,
    routed_scaling_factor=1.0,
    scoring_func="softmax",
    topk_method="greedy",
    vocab_size=102400,
)
_MOONLIGHT = _latents(
    *("deepseek_v3", 2048, 11264, 27, 16),
    bos_token_id=163584,
    eos_token_id=163585,
    max_position_embeddings=8192,
    moe_intermediate_size=1408,
    n_shared_experts=2,
    norm_topk_prob=True,
    num_experts_per_tok=6,
    rope_theta=50000.0,
    routed_scaling_factor=2.446,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    vocab_size=163840,
)
_GLM_FLASH = _latents(
    *("glm4_moe_lite", 2048, 10240, 47, 20),
    eos_token_id=[154820, 154827, 154829],
    max_position_embeddings=202752,
    moe_intermediate_size=1536,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_experts_per_tok=4,
    num_nextn_predict_layers=1,
    pad_token_id=154820,
    q_lora_rank=768,
    qk_nope_head_dim=192,
    rope_theta=1000000,
    routed_scaling_factor=1.8,
    topk_method="noaux_tc",
    v_head_dim=256,
    vocab_size=154880,
)
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-0.6b-fp8": _fp8(_qwen3(1024, 3072, 28, 16, tied=True)),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-8b-fp8": _fp8(_qwen3(4096, 12288, 36, 32)),
    "qwen3-8b-awq": _awq(_qwen3(4096, 12288, 36, 32)),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "qwen3-30b-a3b": _30B_A3B,
    "qwen3-30b-a3b-fp8": _fp8(_30B_A3B),
    "qwen3-30b-a3b-awq": _awq(_30B_A3B),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "deepseek-v2-lite": _DEEPSEEK_V2_LITE,
    "moonlight-16b-a3b": _MOONLIGHT,
    "glm-4.7-flash": _GLM_FLASH,
    "llama-3.1-8b": _llama(4096, 14336, 32, 128),
    "llama-3.2-1b": _llama(2048, 8192, 16, 64, tied=True),
    **shapes_delta.SHAPES,
    **shapes_mamba.SHAPES,
    **shapes_gemma4.SHAPES,
    "qwen3-vl-2b": shapes_vision.qwen3_vl(_qwen3(2048, 6144, 28, 16, tied=True)),
    "qwen3-vl-8b": shapes_vision.qwen3_vl(_qwen3(4096, 12288, 36, 32)),
    "gemma-3-4b": shapes_vision.gemma3(),
    "glm-4.1v-9b": shapes_vision.glm4v(),
    "internvl3.5-8b": shapes_vision.internvl(_qwen3(4096, 12288, 36, 32)),
    "qwen3.5-9b-seeing": shapes_vision.qwen3_5_seeing(shapes_delta.SHAPES["qwen3.5-9b"]),
}

_SPECIAL = {
    "quantization_config", "kv_lora_rank", "linear_num_key_heads", "mamba_n_heads", "mamba_num_heads", "vision_config",
    "global_head_dim",
}  # fmt: skip
PLAIN_SHAPES = sorted(name for name, shape in SHAPES.items() if not shape.keys() & _SPECIAL)
"""Those whose products are of plain numbers, and whose attention has one for queries, keys and values alone."""


_MARKS = ("image_token_id", *shapes_vision.GEMMAS_MARKS)
"""Fields that name words for images in prompts for a shape that sees."""


def write_shape(name: str, folder: Path) -> Path:
    """Write config.json of shape `name` into `folder`; ValueError for an unknown name."""
    if name not in SHAPES:
        raise ValueError(f"shape {name!r} is unknown; want one of {', '.join(SHAPES)}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=2), encoding="utf-8")
    ids = [SHAPES[name][field] for field in _MARKS if field in SHAPES[name]]
    marks = {mark_id: f"<|mark {mark_id}|>" for mark_id in ids}
    if SHAPES[name].get("model_type") == "internvl":
        marks |= shapes_vision.INTERNVLS_WORDS
    tokenizer = _made_up_tokenizer(_num_words(SHAPES[name]), tuple(marks.items()))
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    return folder


def _num_words(shape: dict[str, Any]) -> int:
    count: int = shape.get("text_config", shape)["vocab_size"]
    return count


@functools.cache
def _made_up_tokenizer(vocab_size: int, marks: tuple[tuple[int, str], ...]) -> str:
    """A byte-level tokenizer with a word for each id: a letter for the first ones, then a space and a number; and
    marks, which are no words."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    words = [*letters, *(f"\u0120{index}" for index in range(vocab_size - len(letters)))]
    for mark_id, mark in marks:
        words[mark_id] = mark
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for _, mark in marks])
    return str(tokenizer.to_str())
