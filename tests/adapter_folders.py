"""Random LoRA adapters for tiny checkpoints, as PEFT writes them, and the model with one merged into its weights."""

import copy
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpoints import reference_model

PREFIX = "base_model.model."
_LINEAR = tuple(f"_proj{kind}.weight" for kind in ("", "_qkv", "_z", "_b", "_a", "_qkvz", "_ba"))


def make_adapter(
    folder: Path,
    model_path: Path,
    seed: int,
    *,
    wanted: Callable[[str], bool] = lambda name: True,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Path:
    """For some of the linear modules that `wanted` names, of ranks 1 to 20 that the seed decides. `settings` go into
    adapter_config.json."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    modules = {name: shape for name, shape in linear_modules(model_path).items() if wanted(name)}
    changed = sorted(rng.sample(sorted(modules), max(1, round(0.8 * len(modules)))))
    ranks = {name: rng.randint(1, 20) for name in changed}
    tensors = {}
    for name in changed:
        num_out, num_in = modules[name]
        rank = ranks[name]
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(rank, num_in, generator=generator) / num_in**0.5
        tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(num_out, rank, generator=generator) * 2 / rank**0.5
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 12,
        "bias": "none",
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != 8},
        "alpha_pattern": {rng.choice(changed): 7},
        "target_modules": sorted({name.rpartition(".")[2] for name in changed}),
        **settings,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def flags(folders: Mapping[str | None, Path | None]) -> tuple[str, ...]:
    """An engine's `adapter` for folders by name; None is the model alone."""
    return tuple(f"{name}={folder}" for name, folder in folders.items() if name)


def linear_modules(model_path: Path) -> dict[str, tuple[int, int]]:
    """Rows and columns of those that an adapter may change, by the names of a tiny checkpoint."""
    with safe_open(model_path / "model.safetensors", "pt") as weights:
        names = list(weights.keys())
        of_latents = any("kv_b_proj" in name for name in names)
        left = ("expert", "self_attn.q", "self_attn.kv") if of_latents else ("expert",)
        return {
            name.removesuffix(".weight"): tuple(weights.get_slice(name).get_shape())
            for name in names
            if name.endswith(_LINEAR) and not any(part in name for part in left)
        }


def says(model: Any, prompt: list[int], answer: list[int]) -> bool:
    """Whether each token of an answer is the likeliest, or next to it as sums in another order may have it. Where there
    are many experts such a sum may choose another: what is read a millionth off may then say the same."""
    ids = torch.tensor([[*prompt, *answer]])
    with torch.inference_mode():
        read = model.get_input_embeddings()(ids)
        return _are_likeliest(model(ids), answer) or any(
            _are_likeliest(model(inputs_embeds=read * (1 + 1e-6 * torch.randn_like(read))), answer) for _ in range(9)
        )


def _are_likeliest(output: Any, answer: list[int]) -> bool:
    logits = output.logits[0, -len(answer) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return bool((logits.max(1).values - chosen <= 1e-4 * logits.abs().max()).all())


def merged_model(model_path: Path, folder: Path | None) -> Any:
    """transformers' model, each changed weight W + scale B A; None: as it is."""
    if folder is None:
        return reference_model(model_path)
    model = copy.deepcopy(reference_model(model_path))
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for name, down in tensors.items():
            if not name.endswith("lora_A.weight"):
                continue
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            up = tensors[f"{PREFIX}{module}.lora_B.weight"]
            rank = len(down)
            assert config["rank_pattern"].get(module, config["r"]) == rank
            alpha = config["alpha_pattern"].get(module, config["lora_alpha"])
            scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
            model.get_submodule(module).weight += scale * (up.float() @ down.float())
    return model
