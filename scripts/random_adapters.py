"""Folders of random LoRA adapters for a model, to measure what they cost: all linear modules of all layers."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tercet.model.adapters import module_sizes
from tercet.model.checkpoint import read_config


def write_adapters(model: Path, folder: Path, count: int, rank: int) -> list[str]:
    """So many, as an engine's `adapter` names them: a0, a1 and so on. All are one file's: numbers of different adapters
    take as long as the same ones, and lie elsewhere in memory all the same."""
    config, tensors = read_config(model), {}
    for layer in range(config.num_layers):
        for module, (num_out, num_in) in module_sizes(config, layer).items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = (torch.randn(rank, num_in) / num_in**0.5).bfloat16()
            tensors[f"{name}.lora_B.weight"] = (torch.randn(num_out, rank) / rank**0.5).bfloat16()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank / 4}
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return [f"a{index}={folder}" for index in range(count)]
