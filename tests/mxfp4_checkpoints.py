"""Checkpoints of gpt-oss with experts in MXFP4, by that format's definition, and not from our loader."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def in_mxfp4(model: Path, folder: Path) -> tuple[Path, Path]:
    """This one of plain numbers with experts in MXFP4; and with the numbers that they stand for."""
    stored, plain = (Path(shutil.copytree(model, folder / name)) for name in ("stored", "plain"))
    tensors = load_file(stored / "model.safetensors")
    parts, meant = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            del parts[name]
            parts[f"{name}_blocks"], parts[f"{name}_scales"], meant[name] = _quantized(tensor)
    save_file(parts, stored / "model.safetensors", {"format": "pt"})
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((stored / "config.json").read_text())
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]}
    (stored / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return stored, plain


def _quantized(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[E, I, R] -> blocks, scales, and what they stand for. The largest of a block is at most 6 by its power of two."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    groups = tensor.transpose(1, 2).unflatten(2, (-1, 32))
    powers = torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True) / 6)).clamp(-20, 20)
    codes = (groups[..., None] * torch.exp2(-powers)[..., None] - values).abs().argmin(-1)
    blocks = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    meant = (values[codes] * torch.exp2(powers)).flatten(2).transpose(1, 2)
    return blocks.contiguous(), (powers[..., 0] + 127).to(torch.uint8), meant.contiguous()
