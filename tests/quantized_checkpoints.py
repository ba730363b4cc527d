"""Checkpoints whose matrices are quantized as others quantize them, beside what the stored numbers stand for.

Written from the definitions of the formats, number by number, and not from our loader.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Quantized = tuple[dict[str, Tensor], Tensor]
"""Parts of a module, and the weight that they stand for."""

LARGE: dict[str, Any] = {
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
}
"""Sizes of a model whose matrices are kept as stored on a GPU, with few layers: plain ones are on disk in fp32."""
QUANTIZED = "_proj.weight", "_proj_with_mqa.weight", "_proj_qkv.weight", "_proj_z.weight", "_proj_qkvz.weight"
"""How the names of matrices end that are quantized, unless a test wants less."""


@dataclass(frozen=True)
class Way:
    """Of storing matrices: what config.json says of it, and how it is done."""

    settings: dict[str, Any]
    quantize: Callable[[Tensor, np.random.Generator], Quantized]


def quantized(
    path: Path, way: Way, folder: Path, seed: int = 0, *, wanted: Callable[[str], bool] = lambda name: True
) -> tuple[Path, Path]:
    """The checkpoint with quantized matrices, of those that `wanted` names; and the plain one of the numbers that they
    stand for."""
    rng = np.random.default_rng(seed)
    stored, plain = (Path(shutil.copytree(path, folder / name)) for name in ("stored", "plain"))
    parts: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if name.endswith(QUANTIZED) and wanted(name):
            module = name.removesuffix("weight")
            pieces, meant[name] = way.quantize(tensor.float(), rng)
            parts |= {module + part: piece.contiguous() for part, piece in pieces.items()}
        else:
            parts[name] = meant[name] = tensor
    save_file(parts, stored / "model.safetensors", {"format": "pt"})
    save_file(
        {name: tensor.contiguous() for name, tensor in meant.items()}, plain / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({**config, "quantization_config": way.settings}))
    return stored, plain


def change(stored: Path, changes: Mapping[str, Tensor | None]) -> None:
    """Other tensors in a checkpoint's file; None: that one no longer."""
    file = stored / "model.safetensors"
    tensors = {**load_file(file), **changes}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}, file)


def stack_fp8(stored: Path, plain: Path, way: Way) -> None:
    """Quantize experts too, of which a layer has all in one tensor: as `way` does each by itself."""
    stacks: dict[str, Tensor | None] = {}
    meant: dict[str, Tensor | None] = {}
    for name, tensor in load_file(stored / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts, of_each = zip(*(way.quantize(one, np.random.default_rng()) for one in tensor), strict=True)
            meant[name] = torch.stack(of_each)
            stacks[name] = torch.stack([part["weight"] for part in parts])
            scales = torch.stack([part["weight_scale_inv"] for part in parts])
            stacks[f"{name}_scale_inv"] = scales if scales.ndim == 3 else scales[:, None, None]
            stacks[f"{name}_activation_scale"] = torch.ones(len(tensor))
    change(stored, stacks)
    change(plain, meant)


def fp8(rows: int, columns: int, scale: str = "weight_scale_inv", dtype: torch.dtype = torch.float32) -> Any:
    """A scale for each block of so many rows and columns; 0: of all of them."""

    def quantize(weight: Tensor, rng: np.random.Generator) -> Quantized:
        high, wide = rows or len(weight), columns or weight.shape[1]
        meant, numbers = torch.empty_like(weight), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        scales = torch.empty(-(-weight.shape[0] // high), -(-weight.shape[1] // wide), dtype=dtype)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = (slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide))
                scales[i, j] = weight[place].abs().max() / 448
                numbers[place] = (weight[place] / scales[i, j].float()).to(torch.float8_e4m3fn)
                meant[place] = numbers[place].float() * scales[i, j].float()
        one = scales.reshape(()) if scales.numel() == 1 and not rows else scales
        of_activations = "input_scale" if scale == "weight_scale" else "activation_scale"
        return {"weight": numbers, scale: one, of_activations: torch.ones(())}, meant

    return quantize


def nvfp4(*, divides: bool) -> Any:
    """A scale in FP8 for 16 columns of a row, and one in fp32 for all of them, which `divides` or is multiplied by."""
    most = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

    def quantize(weight: Tensor, rng: np.random.Generator) -> Quantized:
        of_all = (weight.abs().max() / (6 * 448)).float()
        told = 1 / of_all if divides else of_all
        meant, packed = torch.empty_like(weight), torch.zeros(len(weight), weight.shape[1] // 2, dtype=torch.uint8)
        scales = torch.empty(len(weight), weight.shape[1] // 16, dtype=torch.float8_e4m3fn)
        for i in range(len(weight)):
            for j in range(scales.shape[1]):
                group = weight[i, 16 * j : 16 * j + 16]
                scales[i, j] = (group.abs().max() / 6 / of_all).to(torch.float8_e4m3fn)
                scale = scales[i, j].float() / told if divides else scales[i, j].float() * told
                codes = (group.abs()[:, None] / scale.clamp_min(1e-30) - most).abs().argmin(1)
                meant[i, 16 * j : 16 * j + 16] = torch.where(group < 0, -most[codes], most[codes]) * scale
                codes += 8 * (group < 0)
                packed[i, 8 * j : 8 * j + 8] = codes[0::2] + 16 * codes[1::2]
        if divides:
            return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": told.reshape(1)}, meant
        parts = {"weight": packed, "weight_scale": scales, "weight_scale_2": told, "input_scale": torch.ones(())}
        return parts, meant

    return quantize


def int8(group: int, asymmetric: bool) -> Any:
    """Rows of groups of columns."""

    def quantize(weight: Tensor, rng: np.random.Generator) -> Quantized:
        numbers, zeros, scales, meant = _rounded(weight, 8, group, asymmetric)
        parts = {"weight": _signed(numbers, 8), "weight_scale": scales}
        return parts | ({"weight_zero_point": _signed(zeros, 8)} if asymmetric else {}), meant

    return quantize


def packed(
    bits: int, group: int, asymmetric: bool, ordered: bool = False, dtype: torch.dtype = torch.float16
) -> Any:  # fmt: skip
    """Of compressed-tensors. `ordered`: columns are of groups here and there."""

    def quantize(weight: Tensor, rng: np.random.Generator) -> Quantized:
        order = _order(weight, ordered, rng)
        numbers, zeros, scales, meant = _rounded(weight, bits, group, asymmetric, order, dtype)
        parts = {
            "weight_packed": _words(numbers, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if asymmetric:
            parts["weight_zero_point"] = _words(zeros.T, bits).T
        if ordered:
            parts["weight_g_idx"] = _index(order, group)
        return parts, meant

    return quantize


def gptq(bits: int, group: int, offset: int, ordered: bool = False) -> Any:
    """`offset`: what the format's version takes off zeros."""

    def quantize(weight: Tensor, rng: np.random.Generator) -> Quantized:
        order = _order(weight, ordered, rng)
        numbers, zeros, scales, meant = _rounded(weight, bits, group, True, order)
        parts = {
            "qweight": _words(numbers, bits).T,
            "qzeros": _words((zeros.T - offset) % 2**bits, bits),
            "scales": scales.T,
            "g_idx": _index(order, group),
        }
        return parts, meant

    return quantize


def awq(group: int) -> Any:
    """Eight neighbours lie in a word as 0, 2, 4, 6, 1, 3, 5, 7."""

    def quantize(weight: Tensor, rng: np.random.Generator) -> Quantized:
        numbers, zeros, scales, meant = _rounded(weight, 4, group, True)
        order = np.arange(len(weight)).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
        parts = {"qweight": _words(numbers.T[:, order], 4), "qzeros": _words(zeros.T[:, order], 4), "scales": scales.T}
        return parts, meant

    return quantize


def _order(weight: Tensor, ordered: bool, rng: np.random.Generator) -> Any:
    """In which columns go through groups."""
    return rng.permutation(weight.shape[1]) if ordered else np.arange(weight.shape[1])


def _index(order: Any, group: int) -> Tensor:
    """The group of each column."""
    return torch.from_numpy(np.argsort(order) // (group or len(order))).to(torch.int32)


def _rounded(
    weight: Tensor, bits: int, group: int, asymmetric: bool, order: Any = None, dtype: torch.dtype = torch.float16
) -> tuple[Any, Any, Tensor, Tensor]:
    """Numbers and zeros from 0 on, scales in `dtype`, and what they stand for."""
    back = slice(None) if order is None else np.argsort(order)
    weight = weight if order is None else weight[:, order]
    groups = weight.double().numpy().reshape(len(weight), -1, group or weight.shape[1])
    low, high = groups.min(axis=2), groups.max(axis=2)
    top = 2**bits - 1
    if asymmetric:
        scales = torch.from_numpy((high - low) / top).to(dtype)
        zeros = np.clip(np.round(-low / scales.double().numpy()), 0, top).astype(np.int64)
    else:
        scales = torch.from_numpy(np.maximum(high, -low) / (top / 2)).to(dtype)
        zeros = np.full(low.shape, 2 ** (bits - 1))
    steps = scales.double().numpy()[..., None]
    numbers = np.clip(np.round(groups / steps) + zeros[..., None], 0, top).astype(np.int64)
    meant = torch.from_numpy((numbers - zeros[..., None]) * steps).float()
    return numbers.reshape(weight.shape)[:, back], zeros, scales, meant.reshape(weight.shape)[:, back]


def _signed(numbers: Any, bits: int) -> Tensor:
    return torch.from_numpy(numbers - 2 ** (bits - 1)).to(torch.int8)


def _words(numbers: Any, bits: int) -> Tensor:
    """Rows of numbers as rows of words; the last one is filled up with zeros."""
    each = 32 // bits
    words = np.zeros((len(numbers), -(-numbers.shape[1] // each)), dtype=np.int64)
    for column in range(numbers.shape[1]):
        words[:, column // each] |= numbers[:, column] << (bits * (column % each))
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).reshape(words.shape))
