"""The language model of Qwen's checkpoints that can also see, in both forms that a hub has them in."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen2VLConfig, Qwen3VLConfig, Qwen3VLMoeConfig

from checkpoints import random_prompts, randomize
from families import SHAPE
from paged_sequences import Sequences, make_decoder
from tercet.model.checkpoint import read_config

_EYES = {"depth": 1, "hidden_size": 32, "num_heads": 2, "patch_size": 14}
_SECTIONS = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
_YARN = {**_SECTIONS, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "mlp_only_layers": [1]}
_KINDS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "qwen2-vl": (Qwen2VLConfig, {"embed_dim": 32, "hidden_size": 64}, {"rope_parameters": _SECTIONS}),
    "qwen2.5-vl": (
        Qwen2_5_VLConfig,
        {"out_hidden_size": 64, "intermediate_size": 32, "fullatt_block_indexes": [0]},
        {"rope_parameters": _YARN, "tie_word_embeddings": True},
    ),
    "qwen3-vl": (
        Qwen3VLConfig,
        {"out_hidden_size": 64, "intermediate_size": 32, "deepstack_visual_indexes": [0]},
        {"rope_parameters": {**_SECTIONS, "mrope_interleaved": True}, "head_dim": 16},
    ),
    "qwen3-vl-moe": (
        Qwen3VLMoeConfig,
        {"out_hidden_size": 64, "intermediate_size": 32, "deepstack_visual_indexes": [0]},
        {"rope_parameters": {**_SECTIONS, "mrope_interleaved": True}, "head_dim": 16, **_EXPERTS},
    ),
}


@pytest.fixture(scope="module", params=_KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder as transformers writes it, and what transformers makes of it."""
    kind, eyes, text = _KINDS[request.param]
    config = kind(
        text_config={**SHAPE, **text},
        vision_config={**_EYES, **eyes},
        tie_word_embeddings=text.get("tie_word_embeddings", False),
    )
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomize(whole, torch.Generator().manual_seed(3))
    folder = tmp_path_factory.mktemp(request.param)
    whole.save_pretrained(folder)
    return folder, whole


def check_logits(folder: Path, whole: Any) -> None:
    (ids,) = random_prompts(1, 40, 40, seed=9)
    with torch.inference_mode():
        wanted_TV = whole(input_ids=torch.tensor([ids])).logits[0, -4:]
    run = Sequences(make_decoder(folder), 1)
    got = [run.step({}, {0: ids[:-3]})[0], *(run.step({0: token}, {})[0] for token in ids[-3:])]
    torch.testing.assert_close(torch.stack(got), wanted_TV, rtol=1e-4, atol=1e-4 * float(wanted_TV.abs().max()))


def test_logits_are_those_of_the_whole(model: tuple[Path, Any]) -> None:
    check_logits(*model)


def test_the_first_form(model: tuple[Path, Any], tmp_path: Path) -> None:
    """Of Qwen2-VL and Qwen2.5-VL: all settings on one level, the old names of tensors and of positions' settings."""
    folder, whole = model
    raw = json.loads((folder / "config.json").read_text())
    if raw["model_type"].startswith("qwen3_vl"):
        pytest.skip("it came later")
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    kind = "mrope" if rope["rope_type"] == "default" else rope["rope_type"]
    scaling = {**rope, "type": kind} | {"rope_type": None, "rope_theta": None}
    scaling = {name: value for name, value in scaling.items() if value is not None}
    flat = {**text, **raw, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    tensors = load_file(folder / "model.safetensors")
    old = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): name for name in tensors
    }
    save_file({name: tensors[now] for name, now in old.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    check_logits(tmp_path, AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32))
    check_logits(tmp_path, whole)


def test_what_is_silent_is_as_in_transformers(model: tuple[Path, Any], tmp_path: Path) -> None:
    """Every setting but sizes that must be there."""
    raw = json.loads((model[0] / "config.json").read_text())
    text = {"hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 32}
    raw["text_config"] = text | {"max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs = type(model[1].config)(**raw).text_config
    ours = read_config(tmp_path)
    assert ours.vocab_size == theirs.vocab_size
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.head_dim == getattr(theirs, "head_dim", 16)
    assert not any(ours.layer_windows)


def test_experts_as_the_hub_has_them(model: tuple[Path, Any], tmp_path: Path) -> None:
    """Inputs by outputs, which transformers turns when it reads them."""
    folder, whole = model
    tensors = load_file(folder / "model.safetensors")
    stacked = {name for name in tensors if ".experts." in name}
    if not stacked:
        pytest.skip("it has none")
    turned = {name: one.transpose(1, 2).contiguous() if name in stacked else one for name, one in tensors.items()}
    save_file(turned, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    check_logits(tmp_path, AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32))
    check_logits(tmp_path, whole)
