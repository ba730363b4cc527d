"""LoRA adapters of tiny checkpoints, in folders as PEFT writes them; random, and large enough to change answers."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    base: Path,
    seed: int = 0,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    modules: tuple[str, ...] = (*ATTENTION, *MLP),
    scale: float = 1.0,
) -> Path:
    """Of every layer's `modules` in the checkpoint `base`. `scale`: how large its changes are beside the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    with safe_open(base / "model.safetensors", "pt") as weights:
        for name in sorted(weights.keys()):
            layer, _, kind = name.removesuffix(".weight").rpartition(".")
            if kind in modules:
                weight = weights.get_tensor(name).float()
                num_out, num_in = weight.shape
                a = torch.randn(rank, num_in, generator=generator)
                b = torch.randn(num_out, rank, generator=generator)
                b *= scale * weight.norm() / (b @ a).norm() * rank / alpha
                tensors[f"base_model.model.{layer}.{kind}.lora_A.weight"] = a
                tensors[f"base_model.model.{layer}.{kind}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
