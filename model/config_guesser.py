"""What a checkpoint has behind its last layer to guess further tokens with, if config.json or its family says so.

Knows the families that have such a layer, and what they call its tensors; knows no other field.
"""

from tercet.model.blocks import Guesser

_QWEN = "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"
"""Their files have it whatever config.json says."""
_AS_A_LAYER = "deepseek_v3", "glm4_moe", "glm4_moe_lite"
"""Their files have it as one layer more, if config.json says so."""


def guesser(family: str, num_layers: int, guessing_layers: int, *, has_experts: bool) -> Guesser | None:
    """`guessing_layers`: how many config.json speaks of; of several the first guesses all. `has_experts`: whether the
    last of the other layers has some."""
    if family in _QWEN:
        return Guesser(
            layer="mtp.layers.0.",
            token_norm="mtp.pre_fc_norm_embedding",
            hidden_norm="mtp.pre_fc_norm_hidden",
            join="mtp.fc",
            norm="mtp.norm",
            has_experts=has_experts,
            goes_on_normed=True,
        )
    if family in _AS_A_LAYER and guessing_layers:
        layer = f"model.layers.{num_layers}."
        return Guesser(
            layer=layer,
            token_norm=f"{layer}enorm",
            hidden_norm=f"{layer}hnorm",
            join=f"{layer}eh_proj",
            norm=f"{layer}shared_head.norm",
            has_experts=has_experts,
            goes_on_normed=False,
        )
    return None
