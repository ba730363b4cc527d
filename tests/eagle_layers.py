"""Tiny checkpoints of a layer that guesses for another model (EAGLE-3), and what it guesses, in plain PyTorch."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import reference_model

VOCAB = 97
"""Of its head."""


def eagle_checkpoint(
    model: Path, folder: Path, seed: int = 0, *, speculators: bool = False, mapped: bool = True, **overrides: Any
) -> Path:
    """For the checkpoint in `model`. `speculators`: in their layout; `mapped`: its head knows few tokens; `overrides`:
    of its config.json."""
    of_model = json.loads((model / "config.json").read_text())
    hidden, vocab = of_model["hidden_size"], of_model["vocab_size"]
    kv_heads = of_model["num_key_value_heads"]
    head_dim = of_model.get("head_dim") or hidden // of_model["num_attention_heads"]
    heads, inner = 2 * kv_heads, 80
    layer = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "num_hidden_layers": 1, "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0, "max_position_embeddings": of_model["max_position_embeddings"], "vocab_size": vocab,
        "hidden_act": "silu",
    }  # fmt: skip
    count = VOCAB if mapped else vocab
    if speculators:
        config = {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": count,
            "transformer_layer_config": layer, "norm_before_residual": True, **overrides,
        }  # fmt: skip
    else:
        config = {**layer, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": count, **overrides}
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 2.0) -> Tensor:
        return torch.empty(rows, columns).normal_(0.0, gain / columns**0.5, generator=generator)

    def norm() -> Tensor:
        return torch.empty(hidden).uniform_(0.5, 1.5, generator=generator)

    prefix = "layers.0." if speculators else "midlayer."
    tensors = {
        "fc.weight": matrix(hidden, 3 * hidden, 1.0),
        "norm.weight": norm(),
        "lm_head.weight": matrix(count, hidden, 4.0),
        **{f"{prefix}{name}.weight": norm() for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        f"{prefix}self_attn.q_proj.weight": matrix(heads * head_dim, 2 * hidden),
        f"{prefix}self_attn.k_proj.weight": matrix(kv_heads * head_dim, 2 * hidden),
        f"{prefix}self_attn.v_proj.weight": matrix(kv_heads * head_dim, 2 * hidden),
        f"{prefix}self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
        f"{prefix}mlp.gate_proj.weight": matrix(inner, hidden),
        f"{prefix}mlp.up_proj.weight": matrix(inner, hidden),
        f"{prefix}mlp.down_proj.weight": matrix(hidden, inner),
    }
    if mapped:
        known = torch.randperm(vocab, generator=generator)[:VOCAB].sort().values
        tensors |= {
            "d2t": known - torch.arange(VOCAB),
            "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, known, True),
        }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


class ReferenceEagle:
    """What it says of some tokens, all of them computed at once."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model = reference_model(model)
        config = json.loads((folder / "config.json").read_text())
        self._begins_normed = bool(config.get("norm_before_residual"))
        self._layer = config.get("transformer_layer_config", config)
        tensors = load_file(folder / "model.safetensors")
        self._own = {name.removeprefix("midlayer.").removeprefix("layers.0."): one for name, one in tensors.items()}

    def guesses(self, ids: list[int], count: int) -> list[int]:
        """The next `count` of these tokens."""
        with torch.inference_mode():
            out = self._model.model(torch.tensor([ids[:-1]]), output_hidden_states=True)
            depth = self._model.config.num_hidden_layers
            heard = [out.hidden_states[layer][0] for layer in (2, depth // 2, depth - 3)]
            hidden_TD = torch.cat(heard, 1) @ self._own["fc.weight"].T
            guessed: list[int] = []
            for _ in range(count):
                embedded_TD = self._model.model.embed_tokens(torch.tensor([*ids, *guessed][1:]))
                made_D = self._last(embedded_TD, hidden_TD)
                logits = self._own["lm_head.weight"] @ self._norm(made_D, "norm")
                best = int(logits.argmax())
                guessed.append(best + int(self._own["d2t"][best]) if "d2t" in self._own else best)
                hidden_TD = torch.cat((hidden_TD, made_D[None]))
            return guessed

    def _last(self, embedded_TD: Tensor, hidden_TD: Tensor) -> Tensor:
        normed_TD = self._norm(hidden_TD, "hidden_norm")
        read_TE = torch.cat((self._norm(embedded_TD, "input_layernorm"), normed_TD), 1)
        stream_TD = normed_TD if self._begins_normed else hidden_TD
        dim, groups = self._layer["head_dim"], self._layer["num_attention_heads"] // self._layer["num_key_value_heads"]
        q, k, v = (
            (read_TE @ self._own[f"self_attn.{name}_proj.weight"].T).unflatten(1, (-1, dim)).transpose(0, 1)
            for name in "qkv"
        )
        k, v = (one.repeat_interleave(groups, 0) for one in (self._turned(k), v))
        attended = F.scaled_dot_product_attention(self._turned(q), k, v, is_causal=True)
        stream_TD = stream_TD + attended.transpose(0, 1).flatten(1) @ self._own["self_attn.o_proj.weight"].T
        x_D = self._norm(stream_TD[-1], "post_attention_layernorm")
        gated = F.silu(self._own["mlp.gate_proj.weight"] @ x_D) * (self._own["mlp.up_proj.weight"] @ x_D)
        return stream_TD[-1] + self._own["mlp.down_proj.weight"] @ gated

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self._own[f"{name}.weight"]

    @staticmethod
    def _turned(x_HTD: Tensor) -> Tensor:
        length, dim = x_HTD.shape[1:]
        angles = torch.arange(length)[:, None] * 5000.0 ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        first, second = x_HTD.chunk(2, -1)
        return x_HTD * cos + torch.cat((-second, first), -1) * sin
