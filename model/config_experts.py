"""What a config.json says of experts: how many there are, how many serve a token, and which layers have them.

Knows the families that have some, and their names for tensors; knows no other field.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tercet.model.blocks import Clamp, ExpertNames, Experts
from tercet.model.config_fields import flag, number, positive, whole_number
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
    "mistral4": replace(_GLM, bias=""),
    "glm4_moe_lite": _GLM,
    "ernie4_5_moe": replace(_GLM, bias="moe_statics.e_score_correction_bias", bias_is_row=True),
    "hunyuan_v1_moe": replace(_QWEN, router="gate.wg", shared="shared_mlp"),
    "gpt_oss": _GPT_OSS,
    "granitemoehybrid": replace(_QWEN, shared="shared_experts"),
    "nemotron_h": replace(_GLM, gate=""),
    GEMMA4: replace(_QWEN, block="", router="router.proj"),
}
"""What the families that have experts call them."""
_GATED = "shared_expert"
"""What those call their shared MLP that count it by a sigmoid."""
_GLM_LIKE = ("glm4_moe", "dots1", "deepseek_v2", "deepseek_v3", "mistral4", "glm4_moe_lite")
"""Which call how many are shared, and which layers have them, as GLM does."""
_NORMED = ("mixtral", "minimax_m2", "gpt_oss", "granitemoehybrid", "ernie4_5_moe", "hunyuan_v1_moe", GEMMA4)
"""Whose weights of a token's experts add up to one, whatever config.json says."""
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
    "mistral4": 128,
    "glm4_moe_lite": 64,
    "ernie4_5_moe": 64,
    "hunyuan_v1_moe": 1,
}
"""Where config.json is silent."""
_USUAL = "num_experts_per_tok"
_EACH = {"ernie4_5_moe": ("moe_k", 6), "hunyuan_v1_moe": ("moe_topk", 1), GEMMA4: ("top_k_experts", None)}
"""Another name for how many serve a token, and how many do where config.json is silent."""


def experts(config: Mapping[str, Any], family: str) -> Experts | None:
    """The model's experts, if its family has any."""
    if family not in EXPERT_NAMES or (family == "granitemoehybrid" and config["num_local_experts"] == 0):
        return None
    if family == GEMMA4 and not flag(config, "enable_moe_block"):
        return None
    layers, scale = frozenset(range(config["num_hidden_layers"])), 1.0
    size_name, clamp = "moe_intermediate_size", None
    match family:
        case "gpt_oss":
            size_name = "intermediate_size"
            clamp = Clamp(number(config, "swiglu_limit", 7.0), number(config, "swiglu_alpha", 1.702))
        case "mixtral" | "minimax_m2" | "olmoe" | "granitemoehybrid":
            size_name = "intermediate_size"
        case "qwen2_moe" | "qwen3_moe" | "qwen3_next" | "qwen3_5_moe_text":
            layers = _sparse_layers(config)
        case "hunyuan_v1_moe":
            config, size_name = _of_all_layers(config), "intermediate_size"
        case "ernie4_5_moe":
            layers = _layers_between(config)
        case "nemotron_h":
            layers, scale = frozenset(config["moe_layers"]), number(config, "routed_scaling_factor", 1.0)
        case _ if family in _GLM_LIKE:
            layers = _listed_layers(config) if family == "glm4_moe_lite" else _later_layers(config)
            scale = number(config, "routed_scaling_factor", 1.0)
    if not layers:
        return None
    size = positive(config, size_name)
    count, each = _count(config, family), _each(config, family)
    if each > count:
        name, _ = _EACH.get(family, (_USUAL, None))
        raise ValueError(f"config.json: {name} is {each}; want no more than there are experts ({count})")
    groups, best_groups = _groups(config, family, count, each)
    return Experts(
        count=count,
        each=each,
        intermediate_size=size,
        normed=family in _NORMED or flag(config, "norm_topk_prob"),
        scale=scale,
        groups=groups,
        best_groups=best_groups,
        shared=_shared(config, family, size_name),
        shared_gated=EXPERT_NAMES[family].shared == _GATED,
        counts_by_share=family == "ernie4_5_moe",
        clamp=clamp,
        beside=family == GEMMA4,
        layers=layers,
        scored_in_float32=family in ("deepseek_v2", "hunyuan_v1_moe") or bool(EXPERT_NAMES[family].bias),
        names=EXPERT_NAMES[family],
    )


def _shared(config: Mapping[str, Any], family: str, size_name: str) -> int:
    """The MLP that all tokens share as so many experts, of whose size it is a multiple."""
    match family:
        case "hunyuan_v1_moe":
            return 1
        case "ernie4_5_moe":
            return whole_number(config, "moe_num_shared_experts")
        case "granitemoehybrid":
            name = "shared_intermediate_size"
        case "nemotron_h":
            name = "moe_shared_expert_intermediate_size"
        case _ if EXPERT_NAMES[family].shared == _GATED:
            name = "shared_expert_intermediate_size"
        case _:
            return positive(config, "n_shared_experts") if family in _GLM_LIKE else 0
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
    return frozenset(range(whole_number(config, "first_k_dense_replace", first), config["num_hidden_layers"]))


def _of_all_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """With one number where Hunyuan's files have a list of one for each layer. Its experts and the MLP that all tokens
    share are of one size."""
    names = "num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size"
    alike = {name: config[name] for name in names if name in config}
    for name, value in alike.items():
        if isinstance(value, list):
            if len(value) < config["num_hidden_layers"] or any(one != value[0] for one in value):
                raise ValueError(f"config.json: {name} is {value!r}; want one number for all layers")
            alike[name] = value[0]
    for name, wanted in (("num_shared_expert", 1), ("moe_intermediate_size", config["intermediate_size"])):
        if alike.get(name, wanted) != wanted:
            raise ValueError(f"config.json: {name} is {alike[name]!r}; supported: {wanted}")
    return {**config, **alike}


def _layers_between(config: Mapping[str, Any]) -> frozenset[int]:
    """Every so many layers, from one on and up to another, or the last."""
    step, first = positive(config, "moe_layer_interval"), whole_number(config, "moe_layer_start_index")
    last, num_layers = config["moe_layer_end_index"], config["num_hidden_layers"]
    if last != -1:
        last = whole_number(config, "moe_layer_end_index")
    layers = range(first, num_layers if last == -1 else min(last + 1, num_layers))
    return frozenset(layer for layer in layers if (layer + 1) % step == 0)


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
    names = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
    count = _agreed(config, names) or _COUNTS.get(family)
    if count is None:
        name = "num_experts" if family == GEMMA4 else "n_routed_experts"
        raise ValueError(f"config.json: {name} is missing; want a positive whole number")
    return count


def _each(config: Mapping[str, Any], family: str) -> int:
    name, silent = _EACH.get(family, (_USUAL, None))
    return _agreed(config, (name, _USUAL)) or silent or positive(config, name)


def _agreed(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """What all of the names say that are there."""
    there = [name for name in names if name in config]
    numbers = {positive(config, name) for name in there}
    if len(numbers) > 1:
        said = " and ".join(f"{name} is {config[name]}" for name in there)
        raise ValueError(f"config.json: {said}; want one number")
    return numbers.pop() if numbers else None


def _sparse_layers(config: Mapping[str, Any]) -> frozenset[int]:
    """Every so many layers have experts, but for those that are named."""
    step, dense = positive(config, "decoder_sparse_step"), config["mlp_only_layers"]
    if not isinstance(dense, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in dense):
        raise ValueError(f"config.json: mlp_only_layers is {dense!r}; want a list of layers")
    layers = range(config["num_hidden_layers"])
    return frozenset(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)
