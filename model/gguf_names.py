"""What llama.cpp's files of each architecture call their tensors, and how rows lie in them.

Knows names and orders alone; what metadata means is in `gguf_config.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tercet.model.config_experts import EXPERT_NAMES

_SHARED = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = {**_BEHIND, "ffn_norm": "pre_feedforward_layernorm"}
_STACKED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


def _experts(family: str) -> dict[str, str]:
    """All experts of a layer are in one tensor, which has a dimension more; each of them has a name here."""
    names = EXPERT_NAMES[family]
    each = {f"ffn_{part}_exps": f"{names.block}.experts.*.{getattr(names, part)}" for part in ("gate", "up", "down")}
    return {"ffn_gate_inp": f"{names.block}.gate", **each}


@dataclass(frozen=True)
class Architecture:
    """`family`: as a config.json calls it. `in_pairs`: in rows of q and k the two numbers that turn together are side
    by side, and not in the two halves of each head."""

    family: str
    own: Mapping[str, str] = field(default_factory=dict)
    in_pairs: bool = False

    def hugging_face_names(self, name: str, shape: tuple[int, ...]) -> dict[str, int | None]:
        """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`, with the number of the expert where the
        tensor holds many; unknown names stay and count as surplus."""
        names = {**_SHARED, **self.own}
        parts = name.split(".")
        known = names.get(parts[-2]) if len(parts) in (2, 4) else None
        if known is None or (len(parts) == 4) != name.startswith("blk."):
            return {name: None}
        whole = f"{known}.{parts[-1]}" if len(parts) == 2 else f"model.layers.{parts[1]}.{known}.{parts[-1]}"
        if "*" not in known:
            return {whole: None}
        return {whole.replace("*", str(one)): one for one in range(shape[0])} if len(shape) == 3 else {name: None}


MIXTRAL = Architecture("mixtral", _experts("mixtral"), in_pairs=True)
"""Its files are of the architecture llama and count experts."""
ARCHITECTURES = {
    "llama": Architecture("llama", in_pairs=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "phi3": Architecture("phi3", _STACKED),
    "smollm3": Architecture("smollm3", in_pairs=True),
    "granite": Architecture("granite", in_pairs=True),
    "olmo2": Architecture("olmo2", _BEHIND),
    "gemma2": Architecture("gemma2", _GEMMA),
    "gemma3": Architecture("gemma3_text", _GEMMA),
    "qwen3moe": Architecture("qwen3_moe", _experts("qwen3_moe")),
}
