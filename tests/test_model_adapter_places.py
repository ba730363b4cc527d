"""Places for adapters: what is put into one is what a start would have there, and what does not fit is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_folders import make_adapter
from checkpoints import checkpoint
from tercet.model.adapter_file import AdapterFile
from tercet.model.adapter_places import AdapterPlaces, Reserved, check_fits, reserved_ranks
from tercet.model.adapters import adapters_for_cpu, empty_adapters, load_adapters
from tercet.model.checkpoint import read_config

CPU = torch.device("cpu")
PRODUCTS = ("qkv", "o", "gate_up", "down")


def tensors(layers: Any, place: int) -> list[torch.Tensor]:
    """What is in one place."""
    found = []
    for layer in layers:
        for pairs in (getattr(layer, name) for name in PRODUCTS):
            if pairs is not None and hasattr(pairs, "downs"):
                found += [pairs.downs[place].to_dense(), pairs.ups[place].to_dense()]
            elif pairs is not None:
                found += [pairs.down_ARK[place], pairs.up_ANQ[place]]
    return found


@pytest.mark.parametrize("on_gpu", [False, True], ids=["reordered", "as on a GPU"])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "qwen3.5"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_put_is_what_a_start_has_there(family: str, on_gpu: bool, rank: int, tmp_path: Path) -> None:
    path = checkpoint(family)
    config = read_config(path)
    folders = [make_adapter(tmp_path / str(seed), path, seed) for seed in range(3)]
    ranks = reserved_ranks(Reserved(3, 20), config)
    sizes: dict[str, Any] = {"rank": rank, "size": 2, "dtype": torch.float32}
    kinds: dict[str, Any] = {**sizes, "device": CPU, "interleaved": on_gpu}
    first, wanted = [
        load_adapters([file and AdapterFile(file) for file in files], ranks, config, **kinds)
        for files in ((folders[0], folders[1]), (folders[0], folders[2]))
    ]
    if not on_gpu:
        first, wanted = adapters_for_cpu(first), adapters_for_cpu(wanted)
    places = AdapterPlaces(first, ranks, config, rank, 2, torch.float32, on_gpu)
    addresses = [one.data_ptr() for one in tensors(first, 1)] if on_gpu else []
    *_, end = enumerate(places.put(1, places.read(folders[2])), 1)
    assert end[0] == config.num_layers
    for place in range(3):
        assert all(map(torch.equal, tensors(first, place), tensors(wanted, place))), place
    assert on_gpu == bool(addresses)
    assert addresses == ([one.data_ptr() for one in tensors(first, 1)] if on_gpu else [])


def test_every_module_has_room_whatever_comes() -> None:
    config = read_config(checkpoint("llama"))
    ranks = reserved_ranks(Reserved(2, 8), config)
    assert ranks.num_adapters == 2
    assert set(ranks.of_modules.values()) == {8}
    assert len(ranks.of_modules) == 7
    layers = empty_adapters(ranks, config, rank=0, size=1, dtype=torch.float32, device=CPU, interleaved=True)
    assert all(len(getattr(layer, name)) == 2 for layer in layers for name in PRODUCTS)


def test_what_does_not_fit(tmp_path: Path) -> None:
    path = checkpoint("llama")
    config = read_config(path)
    ranks = reserved_ranks(Reserved(1, 16), config)
    with pytest.raises(ValueError, match=r"the rank of self_attn.q_proj is 17; want 16 at most \(--max-adapter-rank\)"):
        check_fits(AdapterFile(of_rank(tmp_path / "high", path, 17)), ranks, config)
    check_fits(AdapterFile(of_rank(tmp_path / "as high as may be", path, 16)), ranks, config)


def of_rank(folder: Path, model: Path, rank: int) -> Path:
    """An adapter of one module."""
    make_adapter(folder, model, 0, wanted=lambda name: name.endswith("layers.0.self_attn.q_proj"))
    tensors = load_file(folder / "adapter_model.safetensors")
    down, up = (next(tensor for name, tensor in tensors.items() if f"lora_{kind}" in name) for kind in "AB")
    sizes = {"lora_A": (rank, down.shape[1]), "lora_B": (up.shape[0], rank)}
    made = {name: torch.randn(next(size for kind, size in sizes.items() if kind in name)) for name in tensors}
    save_file(made, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder
