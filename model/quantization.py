"""What a config.json says of quantized weights: which of five ways, and what the tensors alone do not tell.

Knows settings; reads no tensor (`quantized_matrices.py`). What is not supported is refused by name.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

log = logging.getLogger(__name__)

_FIELDS = ("quantization_config", "compression_config")
"""The second is the old name of the first."""
_NVFP4 = "nvfp4-pack-quantized"


@dataclass(frozen=True)
class Quantization:
    """How numbers are stored. `block`: rows and columns that share a scale, where scales lie in two dimensions.

    `ordered`: columns are of groups here and there, and a tensor must say of which.
    """

    way: Literal["scaled", "compressed", "gptq", "awq", "mxfp4"]
    bits: int = 8
    group_size: int = 0
    zero_offset: int = 0
    ordered: bool = False
    block: tuple[int, int] | None = None
    is_fp8: bool = False
    """As far as settings say; tensors tell by themselves."""
    method: str = ""
    """What settings call it."""


def quantization_of(raw: Mapping[str, Any]) -> Quantization | None:
    """None: weights are stored as plain numbers. ValueError names what is not supported."""
    found = [part[name] for part in _parts(raw) for name in _FIELDS if part.get(name) is not None]
    if not found:
        return None
    settings = found[0]
    if not isinstance(settings, Mapping) or any(other != settings for other in found[1:]):
        raise ValueError(f"config.json: quantization_config is {found if found[1:] else settings!r}; want one object")
    take = _Settings(settings)
    method = take.one_of("quant_method", *_WAYS)
    quantization = replace(_WAYS[method](take), method=method)
    take.name_the_rest()
    return quantization


def without_quantization(raw: Mapping[str, Any]) -> dict[str, Any]:
    """This config.json as if its weights were plain."""
    plain = {name: value for name, value in raw.items() if name not in _FIELDS}
    if isinstance(text := raw.get("text_config"), Mapping):
        plain["text_config"] = {name: value for name, value in text.items() if name not in _FIELDS}
    return plain


def _parts(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    text = raw.get("text_config")
    return [raw, text] if isinstance(text, Mapping) else [raw]


class _Settings:
    """Takes settings one by one; what nobody took is named in the log."""

    def __init__(self, settings: Mapping[str, Any], where: str = "quantization_config") -> None:
        self.where = where
        self._settings = dict(settings)

    def one_of(self, name: str, *wanted: Any) -> Any:
        value = self._settings.pop(name, None)
        if not any(type(value) is type(one) and value == one for one in wanted):
            raise self.refused(name, value, ", ".join("none" if one is None else repr(one) for one in wanted))
        return value

    def whole(self, name: str, *, at_least: int) -> int:
        value = self._settings.pop(name, None)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise self.refused(name, value, f"whole numbers from {at_least} on")
        return value

    def size(self, name: str) -> int:
        """Of groups; 0: of all columns."""
        value = self._settings.get(name)
        return max(self.whole(name, at_least=-1), 0) if value is not None else 0

    def block(self, name: str) -> tuple[int, int] | None:
        value = self._settings.pop(name, None)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
            raise self.refused(name, value, "two whole numbers over 0")
        return value[0], value[1]

    def empty(self, name: str) -> None:
        if value := self._settings.pop(name, None):
            raise self.refused(name, value, "none")

    def part(self, name: str) -> "_Settings | None":
        value = self._settings.pop(name, None)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refused(name, value, "an object")
        return _Settings(value, f"{self.where}.{name}")

    def parts(self) -> "list[_Settings]":
        return [part for name in list(self._settings) if (part := self.part(name)) is not None]

    def drop(self, *names: str) -> None:
        """They say nothing of the numbers that weights stand for, or the tensors say it too."""
        for name in names:
            self._settings.pop(name, None)

    def name_the_rest(self) -> None:
        if self._settings:
            names = ", ".join(sorted(self._settings))
            log.warning("config.json: fields of %s that are not used: %s", self.where, names)

    def refused(self, name: str, value: Any, supported: str) -> ValueError:
        return ValueError(f"config.json: {self.where}.{name} is {value!r}; supported: {supported}")


def _fp8(take: _Settings) -> Quantization:
    take.one_of("activation_scheme", None, "dynamic", "static")  # activations are not quantized here
    take.one_of("fmt", None, "e4m3", "float8_e4m3fn")
    take.drop("modules_to_not_convert", "ignored_layers", "scale_fmt", "dequantize", "kv_cache_scheme")
    return Quantization("scaled", block=take.block("weight_block_size"), is_fp8=True)


def _fbgemm_fp8(take: _Settings) -> Quantization:
    take.drop("activation_scale_ub", "modules_to_not_convert")
    return Quantization("scaled", is_fp8=True)


def _compressed(take: _Settings) -> Quantization:
    take.one_of("quantization_status", None, "compressed")
    formats = "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "dense", _NVFP4
    form = take.one_of("format", *formats, "mixed-precision")
    if (sparse := take.part("sparsity_config")) is not None:
        sparse.one_of("format", None, "dense")
    take.empty("transform_config")
    take.drop("ignore", "kv_cache_scheme", "global_compression_ratio", "version", "packed_modules_mapping")
    kinds, blocks, orders, sizes = set(), set(), set(), set()
    groups = take.part("config_groups")
    for group in groups.parts() if groups is not None else ():
        own_form = group.one_of("format", None, *formats) or form
        if (weights := group.part("weights")) is None:
            continue
        kind = weights.one_of("type", "int", "float")
        # Tensors tell these, too: packed ones their bits by words, others by their type.
        bits_of_float = 4 if own_form == _NVFP4 else 8
        kinds.add((kind, weights.one_of("num_bits", *((4, 8) if kind == "int" else (bits_of_float,)))))
        sizes.add(weights.size("group_size"))
        order = weights.one_of("actorder", None, False, True, "weight", "static", "group", "dynamic")
        orders.add(order in (True, "group", "dynamic"))
        strategy = weights.one_of("strategy", None, "tensor", "channel", "group", "tensor_group", "block")
        if strategy == "block":
            blocks.add(weights.block("block_structure"))
    if len(blocks) > 1 or None in blocks:
        raise take.refused("config_groups", f"with blocks {sorted(map(str, blocks))}", "one block_structure")
    block = blocks.pop() if blocks else None
    bits = 4 if kinds == {("int", 4)} else 8
    group_size = sizes.pop() if len(sizes) == 1 else 0
    is_fp8 = kinds == {("float", 8)}
    return Quantization("compressed", bits, group_size, ordered=orders == {True}, block=block, is_fp8=is_fp8)


def _modelopt(take: _Settings) -> Quantization:
    """NVIDIA's: tensors tell of each module which it is."""
    ways = "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "fp8_pb_wo", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"
    algorithm = take.one_of("quant_algo", *ways)
    take.one_of("group_size", None, 16, 128)
    take.drop("ignore", "exclude_modules", "kv_cache_scheme", "kv_cache_quant_algo", "producer", "config_groups")
    take.drop("quantized_layers")
    block = (128, 128) if algorithm in ("FP8_PB_WO", "fp8_pb_wo") else None
    return Quantization("scaled", block=block, is_fp8=block is not None or algorithm.startswith("FP8"))


def _gptq(take: _Settings) -> Quantization:
    bits = take.one_of("bits", 2, 4, 8)
    group_size = take.whole("group_size", at_least=-1)
    formats = ("gptq", "gptq_v2")
    kind = take.one_of("checkpoint_format", None, *formats)
    other = take.one_of("format", None, *formats)
    take.one_of("pack_dtype", None, "int32")
    take.empty("dynamic")
    ordered = take.one_of("desc_act", None, False, True)
    take.drop("sym", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "lm_head")
    take.drop("model_name_or_path", "model_file_base_name", "meta", "quantizer")
    # The first format stores zeros less one.
    offset = 0 if "gptq_v2" in (kind, other) else 1
    return Quantization("gptq", bits, max(group_size, 0), offset, bool(ordered))


def _awq(take: _Settings) -> Quantization:
    bits = take.one_of("bits", 4)
    group_size = take.whole("group_size", at_least=-1)
    take.one_of("zero_point", True)
    for name in ("version", "format"):
        take.one_of(name, None, "gemm", "GEMM")
    take.drop("modules_to_not_convert", "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config")
    return Quantization("awq", bits, max(group_size, 0))


def _mxfp4(take: _Settings) -> Quantization:
    take.drop("modules_to_not_convert", "dequantize")
    return Quantization("mxfp4", 4, 32)


_WAYS = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
}
