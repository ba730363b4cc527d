"""GGUF files of tiny checkpoints, made the way llama.cpp's converter makes them.

Written from what the converter does to tensors and settings, and by the package gguf's own names; it shares nothing
with the reader that is tested but the architectures' names.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

_ARCHITECTURES = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe", "mixtral": "llama"}
_SIDE_BY_SIDE = ("llama", "granite", "smollm3")
"""Architectures of which q and k rows that turn together come to lie side by side."""
_STACKS = {
    "mixtral": "layers.{}.feed_forward.experts.{}.weight",
    "qwen3_moe": "model.layers.{}.mlp.experts.{}.weight",
}
"""What the one tensor of all experts of a layer is called on its way."""


def convert(
    folder: Path,
    file: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    settings: dict[str, Any] | None = None,
    extra: dict[str, Tensor] | None = None,
    *,
    leave_out: str = "",
    tensors_each: int = 0,
) -> Path:
    """A checkpoint's file, matrices quantized to `kind`; several where a file has its fill of tensors.

    `settings`: other values of settings, None: left out. `leave_out`: a tensor.
    """
    converter = _Converter(folder, file, kind, leave_out, tensors_each)
    for name, value in (settings or {}).items():
        converter.set(name, value)
    converter.write(load_file(folder / "model.safetensors"), extra or {})
    return file


def rounded(folder: Path, kind: GGMLQuantizationType, into: Path) -> Path:
    """The checkpoint with the numbers that its file of this kind holds."""
    state = load_file(folder / "model.safetensors")
    into.mkdir()
    shutil.copy(folder / "config.json", into)
    save_file({name: _rounded(name, tensor, kind) for name, tensor in state.items()}, into / "model.safetensors")
    return into


class _Converter:
    def __init__(self, folder: Path, file: Path, kind: GGMLQuantizationType, leave_out: str, tensors_each: int) -> None:
        self._config = AutoConfig.from_pretrained(folder)
        self._family = self._config.model_type
        self._kind = kind
        self._leave_out = leave_out
        self._arch = _ARCHITECTURES.get(self._family, self._family)
        self._writer = gguf.GGUFWriter(file, self._arch, split_max_tensors=tensors_each)
        architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self._arch)
        self._names = gguf.get_tensor_name_map(architecture, self._config.num_hidden_layers)
        self._settings()
        self._vocabulary(folder)

    def write(self, state: dict[str, Tensor], extra: dict[str, Tensor]) -> None:
        self._tensors(state)
        for name, tensor in extra.items():
            self._writer.add_tensor(name, tensor.numpy())
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()

    def set(self, name: str, value: Any) -> None:
        """The last word on a setting; None: it is left out."""
        key = f"{self._arch}.{name}"
        self._writer.kv_data[0].pop(key, None)
        add = {bool: self._writer.add_bool, int: self._writer.add_uint32, float: self._writer.add_float32}
        match value:
            case None:
                pass
            case list():
                self._writer.add_array(key, value)
            case str():
                self._writer.add_string(key, value)
            case _:
                add[type(value)](key, value)

    def _settings(self) -> None:
        config, writer, family = self._config, self._writer, self._family
        rope = config.rope_parameters
        rope = rope.get("full_attention", rope)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_file_type(0)
        if family != "gemma2":
            writer.add_rope_freq_base(rope["rope_theta"])
        if family != "granite" and getattr(config, "head_dim", None) is not None:
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)
        if self._arch in _SIDE_BY_SIDE:
            writer.add_vocab_size(config.vocab_size)
            writer.add_rope_dimension_count(
                getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            )
        match family:
            case "gemma2":
                writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
                writer.add_final_logit_softcapping(config.final_logit_softcapping)
                writer.add_sliding_window(config.sliding_window)
            case "gemma3_text":
                writer.add_final_logit_softcapping(config.final_logit_softcapping)
                writer.add_sliding_window(config.sliding_window)
                writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
                writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
                writer.add_rope_scaling_factor(rope["factor"])
            case "phi3":
                self._phi3(rope)
            case "granite":
                writer.add_attention_scale(config.attention_multiplier)
                writer.add_embedding_scale(config.embedding_multiplier)
                writer.add_residual_scale(config.residual_multiplier)
                writer.add_logit_scale(config.logits_scaling)
            case "mixtral" | "qwen3_moe":
                writer.add_expert_count(config.num_local_experts)
                writer.add_expert_used_count(config.num_experts_per_tok)
                if family == "qwen3_moe":
                    writer.add_expert_feed_forward_length(config.moe_intermediate_size)

    def _phi3(self, rope: dict[str, Any]) -> None:
        config, writer = self._config, self._writer
        original = config.original_max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(original)
        turned = int(rope.get("partial_rotary_factor", 1.0) * config.hidden_size) // config.num_attention_heads
        writer.add_rope_dimension_count(turned)
        writer.add_sliding_window(config.sliding_window or 0)
        if "long_factor" in rope:
            scale = config.max_position_embeddings / original
            stretched = np.sqrt(1 + np.log(scale) / np.log(original)) if scale > 1 else 1.0
            writer.add_rope_scaling_attn_factors(float(stretched))
            for length in ("long", "short"):
                writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))

    def _vocabulary(self, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokens = tokenizer.convert_ids_to_tokens(range(self._config.vocab_size))
        self._writer.add_tokenizer_model("gpt2")
        self._writer.add_tokenizer_pre("gpt-2")
        self._writer.add_token_list(tokens)
        self._writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in tokens])
        merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
        self._writer.add_token_merges([" ".join(pair) for pair in merges])

    def _tensors(self, state: dict[str, Tensor]) -> None:
        stacks: dict[str, dict[int, Tensor]] = {}
        for name, tensor in state.items():
            if ".experts." in name:
                _, _, layer, _, _, expert, part, _ = name.split(".")
                stacks.setdefault(_STACKS[self._family].format(layer, part), {})[int(expert)] = tensor
            elif name != "lm_head.weight" or not self._config.tie_word_embeddings:
                self._add(name, self._changed(name, tensor))
        for name, experts in stacks.items():
            self._add(name, torch.stack([experts[one] for one in range(len(experts))]))

    def _changed(self, name: str, tensor: Tensor) -> Tensor:
        if self._family in ("gemma2", "gemma3_text") and name.endswith("norm.weight"):
            return tensor + 1
        heads = {"q_proj": self._config.num_attention_heads, "k_proj": self._config.num_key_value_heads}
        count = heads.get(name.split(".")[-2])
        if count is None or self._arch not in _SIDE_BY_SIDE:
            return tensor
        halves = tensor.reshape(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)

    def _add(self, name: str, tensor: Tensor) -> None:
        stem, suffix = name.rsplit(".", 1)
        theirs = f"{self._names.get_name(stem)}.{suffix}"
        if theirs == self._leave_out:
            return
        kind = _kind_of(name, tensor, self._kind)
        data = gguf.quants.quantize(np.ascontiguousarray(tensor.numpy()), kind)
        self._writer.add_tensor(theirs, data, raw_dtype=kind)


def _kind_of(name: str, tensor: Tensor, kind: GGMLQuantizationType) -> GGMLQuantizationType:
    """Vectors and what chooses experts stay as they are."""
    is_router = name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight"))
    return GGMLQuantizationType.F32 if tensor.ndim == 1 or is_router else kind


def _rounded(name: str, tensor: Tensor, kind: GGMLQuantizationType) -> Tensor:
    kind = _kind_of(name, tensor, kind)
    data = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)
    return torch.from_numpy(np.array(data, np.float32))
