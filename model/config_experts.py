"""What a config.json says of experts: how many there are, how many serve a token, and which layers have them.

Knows the families that have some, and their names for tensors; knows no other field.
"""

from collections.abc import Mapping
from typing import Any

from tercet.model.config import Experts
from tercet.model.config_fields import flag, positive

EXPERT_NAMES = {
    "mixtral": {"block": "block_sparse_moe", "gate": "w1", "up": "w3", "down": "w2"},
    "qwen3_moe": {"block": "mlp", "gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
}
"""What the families that have experts call them."""


def experts(config: Mapping[str, Any], family: str) -> Experts | None:
    """The model's experts, if its family has any."""
    layers = frozenset(range(config["num_hidden_layers"]))
    match family:
        case "mixtral":
            size, normed = positive(config, "intermediate_size"), True
        case "qwen3_moe":
            size, normed = positive(config, "moe_intermediate_size"), flag(config, "norm_topk_prob")
            layers = _sparse_layers(config)
        case _:
            return None
    if not layers:
        return None
    count, each = _count(config, family), positive(config, "num_experts_per_tok")
    if each > count:
        raise ValueError(f"config.json: num_experts_per_tok is {each}; want no more than there are experts ({count})")
    return Experts(count=count, each=each, intermediate_size=size, normed=normed, layers=layers, **EXPERT_NAMES[family])


def _count(config: Mapping[str, Any], family: str) -> int:
    """Files have either name, by the version of transformers that wrote them."""
    names = [name for name in ("num_experts", "num_local_experts") if name in config]
    counts = {positive(config, name) for name in names}
    if len(counts) > 1:
        raise ValueError(
            f"config.json: num_experts is {config['num_experts']} and num_local_experts is "
            f"{config['num_local_experts']}; want one number"
        )
    return counts.pop() if counts else {"mixtral": 8, "qwen3_moe": 128}[family]


def _sparse_layers(config: Mapping[str, Any]) -> frozenset[int]:
    """Every so many layers have experts, but for those that are named."""
    step, dense = positive(config, "decoder_sparse_step"), config["mlp_only_layers"]
    if not isinstance(dense, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in dense):
        raise ValueError(f"config.json: mlp_only_layers is {dense!r}; want a list of layers")
    layers = range(config["num_hidden_layers"])
    return frozenset(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)
