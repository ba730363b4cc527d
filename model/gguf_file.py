"""A GGUF file as a `Checkpoint`, dequantized while it is read, and the ModelConfig in its metadata.

Knows llama.cpp's names for tensors and settings, and that its `llama` files hold q and k rows in another order.
A setting it does not know is refused by name.
"""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tercet.model.config import ModelConfig
from tercet.model.rope import Rope
from tercet.model.shard import EMBEDDING, LM_HEAD

FAMILIES = ("llama", "qwen2", "qwen3")
_NAMES = {
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
_ROPE_FACTORS = "rope_freqs.weight"
_PIECE_NUMBERS = 2**20
"""Of one read, unless a head's rows are more: dequantizing needs several times their memory."""
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufCheckpoint:
    """One .gguf file. ValueError if it is truncated, not GGUF, or holds a type that cannot be dequantized."""

    def __init__(self, path: Path) -> None:
        self.source = str(path)
        reader = _open(path)
        self._fields: Mapping[str, Any] = reader.fields
        self._tensors = {_hugging_face_name(tensor.name): tensor for tensor in reader.tensors}
        self._factors = self._tensors.pop(_ROPE_FACTORS, None)
        self.config = self._parse()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: _shape(tensor) for name, tensor in self._tensors.items()}

    def read(self, name: str, dim: int, start: int, stop: int) -> Iterator[Tensor]:
        tensor = self._tensors[name]
        shape = _shape(tensor)
        first, last = (start, stop) if dim == 0 else (0, shape[0])
        # Whole heads, which may have to be put in order.
        each = max(_PIECE_NUMBERS // prod(shape[1:]) // self.config.head_dim, 1) * self.config.head_dim
        for row in range(first, last, each):
            # Quantization blocks lie along the rows: rows can be cut before, columns only after dequantizing.
            data = tensor.data[row : min(row + each, last)]
            values = torch.from_numpy(_dequantize(data, tensor.tensor_type, self.source, name))
            if dim == 1:
                yield values[:, start:stop]
            elif self.config.family == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
                yield self._unpermute(values)
            else:
                yield values

    def _unpermute(self, values: Tensor) -> Tensor:
        """Back from rotation pairs side by side to the two halves of each head; pieces hold whole heads."""
        half = self.config.head_dim // 2
        return values.view(-1, half, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)

    def _parse(self) -> ModelConfig:
        self._check_whole()
        family = self._field("general.architecture", str)
        if family not in FAMILIES:
            raise ValueError(f"{self.source}: architecture is {family!r}; supported: {', '.join(FAMILIES)}")
        settings = {
            name.removeprefix(f"{family}."): field.contents()
            for name, field in self._fields.items()
            if name.startswith(f"{family}.")
        }
        shapes = self.shapes()
        if EMBEDDING not in shapes:
            raise ValueError(f"{self.source}: tensor token_embd.weight is missing")
        take = _Settings(self.source, family, settings)
        context_length = take.whole("context_length")
        hidden_size, num_heads = take.whole("embedding_length"), take.whole("attention.head_count")
        head_dim = take.whole("attention.key_length", hidden_size // num_heads)
        for name in ("attention.value_length", "rope.dimension_count"):
            if (value := take.whole(name, head_dim)) != head_dim:
                raise ValueError(f"{self.source}: {family}.{name} is {value}; supported: {head_dim}, the head's size")
        take.whole("vocab_size", 1)  # the embedding's own shape says it
        config = ModelConfig(
            family=family,
            vocab_size=shapes[EMBEDDING][0],
            hidden_size=hidden_size,
            intermediate_size=take.whole("feed_forward_length"),
            num_layers=take.whole("block_count"),
            num_heads=num_heads,
            num_kv_heads=take.whole("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=take.number("attention.layer_norm_rms_epsilon"),
            rope=self._rope(take, context_length),
            max_position_embeddings=context_length,
            tie_word_embeddings=LM_HEAD not in shapes,
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in shapes,
            o_bias="model.layers.0.self_attn.o_proj.bias" in shapes,
            mlp_bias="model.layers.0.mlp.gate_proj.bias" in shapes,
            qk_norm=family == "qwen3",
            dtype=self._dtype(),
        )
        take.check_all_taken()
        return config

    def _check_whole(self) -> None:
        """A part of a split file would lack tensors, and all but the first part lack the settings too."""
        if "split.count" in self._fields and (count := self._field("split.count", int)) > 1:
            number = self._field("split.no", int) + 1
            raise ValueError(f"{self.source} is part {number} of {count}; want them merged (llama-gguf-split --merge)")

    def _dtype(self) -> torch.dtype:
        """Of the matrices; quantized ones have none, and bfloat16 holds any of them."""
        kinds = {tensor.tensor_type.name for tensor in self._tensors.values() if len(tensor.shape) == 2}
        if kinds <= _PLAIN.keys():
            return _PLAIN[self._tensors[EMBEDDING].tensor_type.name]
        return torch.bfloat16

    def _rope(self, take: "_Settings", context_length: int) -> Rope:
        # What is not there is as in llama.cpp; only a factor of 0, which counts as none there, is refused.
        theta = take.number("rope.freq_base", 10_000.0, above=1)
        factor = take.number("rope.scaling.factor", 1.0)
        kind = take.text("rope.scaling.type", "none" if factor == 1 else "linear")
        original = int(take.number("rope.scaling.original_context_length", context_length, above=1))
        take.drop("rope.scaling.finetuned")
        if self._factors is not None:
            values = _dequantize(self._factors.data, self._factors.tensor_type, self.source, _ROPE_FACTORS)
            if kind != "none":
                raise ValueError(
                    f"{self.source}: {_ROPE_FACTORS} beside rope.scaling.type {kind!r}; supported: one of the two"
                )
            if not (values > 0).all():
                raise ValueError(f"{self.source}: {_ROPE_FACTORS} has {values.min()}; want numbers over 0")
            return Rope(theta, "factors", factors=tuple(values.tolist()))
        match kind:
            case "none":
                return Rope(theta)
            case "linear":
                return Rope(theta, "linear", factor=factor)
            case "yarn":
                attention_factor = 1.0 if factor <= 1 else 0.1 * float(np.log(factor)) + 1.0
                return Rope(theta, "yarn", factor, original, attention_factor=attention_factor)
        raise ValueError(f"{self.source}: rope.scaling.type is {kind!r}; supported: none, linear, yarn")

    def _field(self, name: str, kind: type) -> Any:
        value = self._fields[name].contents() if name in self._fields else None
        if not isinstance(value, kind):
            raise ValueError(f"{self.source}: {name} is {value!r}; want a {kind.__name__}")
        return value


class _Settings:
    """Takes settings one by one; what nobody took is a setting we would get wrong."""

    def __init__(self, source: str, family: str, settings: dict[str, Any]) -> None:
        self._source, self._family, self._settings = source, family, settings

    def whole(self, name: str, default: int | None = None) -> int:
        value = self._settings.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ValueError(f"{self._source}: {self._family}.{name} is {value!r}; want a positive whole number")
        return value

    def number(self, name: str, default: float | None = None, *, above: float = 0) -> float:
        value = self._settings.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < float("inf"):
            raise ValueError(f"{self._source}: {self._family}.{name} is {value!r}; want a number over {above}")
        return float(value)

    def text(self, name: str, default: str) -> str:
        return str(self._settings.pop(name, default))

    def drop(self, name: str) -> None:
        self._settings.pop(name, None)

    def check_all_taken(self) -> None:
        left = {name: value for name, value in self._settings.items() if value not in (0, False, 0.0, "")}
        if left:
            names = ", ".join(f"{self._family}.{name}" for name in sorted(left))
            raise ValueError(f"{self._source}: settings that are not supported and may change the result: {names}")


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ValueError(f"{path}: reading GGUF needs the package gguf: pip install 'tercet[demo]'") from None

    class PlainReader(GGUFReader):  # type: ignore[misc]
        """Reads through a plain array: slicing a np.memmap, once for every string of the vocabulary, takes 3 times as
        long as all the rest."""

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = np.asarray(mapped)

    try:
        return PlainReader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ValueError(f"{path} is truncated or not a readable GGUF file: {error}") from None


def _shape(tensor: Any) -> tuple[int, ...]:
    # GGUF counts dimensions from the innermost.
    return tuple(int(n) for n in reversed(tensor.shape))


def _dequantize(data: Any, kind: Any, source: str, name: str) -> Any:
    from gguf.quants import dequantize

    try:
        return np.array(dequantize(data, kind), dtype=np.float32)
    except NotImplementedError:
        raise ValueError(f"{source}: tensor {name} is of type {kind.name}, which cannot be dequantized") from None


def _hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names stay and count as surplus."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _NAMES:
        return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _NAMES:
        return f"{_NAMES[parts[0]]}.{parts[1]}"
    return name
