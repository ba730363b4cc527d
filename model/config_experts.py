"""What a config.json says of experts: how many there are, how many serve a token, and which layers have them.

Knows the families that have some, and their names for tensors; knows no other field.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tercet.model.blocks import Clamp, ExpertNames, Experts
from tercet.model.config_fields import flag, number, positive
from tercet.model.config_gemma4 import GEMMA4

_MIXTRAL = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")
_QWEN = ExpertNames(block="mlp", gate="gate_proj", up="up_proj", down="down_proj")
_GLM = replace(_QWEN, shared="shared_experts", bias="gate.e_score_correction_bias")
_GPT_OSS = ExpertNames(block="mlp", gate_up="gate_up_proj", down="down_proj", router="router")
EXPERT_NAMES = {
    "mixtral": _MIXTRAL,
    "minimax_m2": replace(_MIXTRAL, bias="e_score_correction_bias"),
    "qwen2_moe": replace(_QWEN, shared="shared_expert"),
    "qwen3_moe": _QWEN,
    "qwen3_next": replace(_QWEN, shared="shared_expert"),
    "qwen3_5_moe_text": replace(_QWEN, shared="shared_expert"),
    "olmoe": _QWEN,
    "glm4_moe": _GLM,
    "dots1": _GLM,
    "deepseek_v2": replace(_GLM, bias=""),
    "deepseek_v3": _GLM,
    "glm4_moe_lite": _GLM,
    "gpt_oss": _GPT_OSS,
    "granitemoehybrid": replace(_QWEN, shared="shared_experts"),
    "nemotron_h": replace(_GLM, gate=""),
    GEMMA4: replace(_QWEN, block="", router="router.proj"),
}
"""What the families that have experts call them."""
_NORMED = ("mixtral", "minimax_m2", "gpt_oss", "granitemoehybrid", GEMMA4)
"""Of which weights add up to one, whatever config.json says."""
_COUNTS = {
    "mixtral": 8,
    "minimax_m2": 256,
    "qwen2_moe": 60,
    "qwen3_moe": 128,
    "qwen3_next": 512,
    "qwen3_5_moe_text": 256,
    "olmoe": 64,
    "glm4_moe": 128,
    "gpt_oss": 128,
    "deepseek_v2": 64,
    "deepseek_v3": 256,
    "glm4_moe_lite": 64,
}
"""Where config.json is silent."""


def experts(config: Mapping[str, Any], family: str) -> Experts | None:
    """The model's experts, if its family has any."""
    if family not in EXPERT_NAMES or (family == "granitemoehybrid" and config["num_local_experts"] == 0):
        return None
    if family == GEMMA4 and not flag(config, "enable_moe_block"):
        return None
    layers, scale = frozenset(range(config["num_hidden_layers"])), 1.0
    size_name, shared = "moe_intermediate_size", 0
    clamp = None
    match family:
        case "gpt_oss":
            size_name = "intermediate_size"
            clamp = Clamp(number(config, "swiglu_limit", 7.0), number(config, "swiglu_alpha", 1.702))
        case "mixtral" | "minimax_m2" | "olmoe" | "granitemoehybrid":
            size_name = "intermediate_size"
        case "qwen2_moe" | "qwen3_moe" | "qwen3_next" | "qwen3_5_moe_text":
            layers = _sparse_layers(config)
        case "nemotron_h":
            layers, scale = frozenset(config["moe_layers"]), number(config, "routed_scaling_factor", 1.0)
        case "glm4_moe" | "dots1" | "deepseek_v2" | "deepseek_v3" | "glm4_moe_lite":
            layers = _listed_layers(config) if family == "glm4_moe_lite" else _later_layers(config)
            scale, shared = number(config, "routed_scaling_factor", 1.0), positive(config, "n_shared_experts")
    if not layers:
        return None
    size = positive(config, size_name)
    each_name = "top_k_experts" if family == GEMMA4 else "num_experts_per_tok"
    count, each = _count(config, family), positive(config, each_name)
    if each > count:
        raise ValueError(f"config.json: {each_name} is {each}; want no more than there are experts ({count})")
    groups, best_groups = _groups(config, family, count, each)
    shared_gated = EXPERT_NAMES[family].shared == "shared_expert"
    if shared_gated:
        shared = _shared_of_size(config, "shared_expert_intermediate_size", size_name)
    elif family == "granitemoehybrid":
        shared = _shared_of_size(config, "shared_intermediate_size", size_name)
    elif family == "nemotron_h":
        shared = _shared_of_size(config, "moe_shared_expert_intermediate_size", size_name)
    return Experts(
        count=count,
        each=each,
        intermediate_size=size,
        normed=family in _NORMED or flag(config, "norm_topk_prob"),
        scale=scale,
        groups=groups,
        best_groups=best_groups,
        shared=shared,
        shared_gated=shared_gated,
        clamp=clamp,
        beside=family == GEMMA4,
        layers=layers,
        scored_in_float32=family == "deepseek_v2" or bool(EXPERT_NAMES[family].bias),
        names=EXPERT_NAMES[family],
    )


def _shared_of_size(config: Mapping[str, Any], name: str, size_name: str) -> int:
    """The shared MLP as experts, of whose size it is a multiple."""
    shared, size = positive(config, name), positive(config, size_name)
    if shared % size:
        raise ValueError(f"config.json: {name} is {shared}; want a multiple of {size_name} ({size})")
    return shared // size


def _groups(config: Mapping[str, Any], family: str, count: int, each: int) -> tuple[int, int]:
    """Into how many parts they fall, and how many of those a token's experts are of."""
    if (
        family not in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "nemotron_h")
        or config.get("topk_method") == "greedy"
    ):
        return 1, 1
    groups, best = positive(config, "n_group"), positive(config, "topk_group")
    if count % groups:
        raise ValueError(f"config.json: n_group is {groups}; want a divisor of the number of experts ({count})")
    if best > groups:
        raise ValueError(f"config.json: topk_group is {best}; want no more than n_group ({groups})")
    if best == groups:
        return 1, 1
    size = count // groups
    if EXPERT_NAMES[family].bias and size < 2:
        raise ValueError(f"config.json: n_group is {groups}; want {count // 2} at most: a group's best two count")
    if each > best * size:
        wanted = f"want no more than {best} groups of {size} have (topk_group, n_group)"
        raise ValueError(f"config.json: num_experts_per_tok is {each}; {wanted}")
    return groups, best


def _later_layers(config: Mapping[str, Any], first: int = 0) -> frozenset[int]:
    """All but so many, which have one MLP. `first`: where nothing is said."""
    first = config.get("first_k_dense_replace", first)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise ValueError(f"config.json: first_k_dense_replace is {first!r}; want a whole number")
    return frozenset(range(first, config["num_hidden_layers"]))


def _listed_layers(config: Mapping[str, Any]) -> frozenset[int]:
    """As a list has them; where there is none, as `_later_layers`, and never otherwise than that."""
    types = config.get("mlp_layer_types")
    if types is None:
        return _later_layers(config, 1)
    known, num_layers = ("dense", "sparse"), config["num_hidden_layers"]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
        raise ValueError(f"config.json: mlp_layer_types is {types!r}; want dense or sparse for each layer")
    listed = frozenset(layer for layer, kind in enumerate(types) if kind == "sparse")
    if "first_k_dense_replace" in config and _later_layers(config) != listed:
        said = f"mlp_layer_types is {types!r} and first_k_dense_replace is {config['first_k_dense_replace']!r}"
        raise ValueError(f"config.json: {said}; want them to agree")
    return listed


def _count(config: Mapping[str, Any], family: str) -> int:
    """Files have either name, by the version of transformers that wrote them."""
    names = [name for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in config]
    counts = {positive(config, name) for name in names}
    if len(counts) > 1:
        said = " and ".join(f"{name} is {config[name]}" for name in names)
        raise ValueError(f"config.json: {said}; want one number")
    if not counts and family not in _COUNTS:
        name = "num_experts" if family == GEMMA4 else "n_routed_experts"
        raise ValueError(f"config.json: {name} is missing; want a positive whole number")
    return counts.pop() if counts else _COUNTS[family]


def _sparse_layers(config: Mapping[str, Any]) -> frozenset[int]:
    """Every so many layers have experts, but for those that are named."""
    step, dense = positive(config, "decoder_sparse_step"), config["mlp_only_layers"]
    if not isinstance(dense, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in dense):
        raise ValueError(f"config.json: mlp_only_layers is {dense!r}; want a list of layers")
    layers = range(config["num_hidden_layers"])
    return frozenset(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)
