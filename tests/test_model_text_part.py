"""The language model of checkpoints that can also see: transformers' logits, both kinds of names, clear refusals."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Gemma3Config, InternVLConfig, Mistral3Config

from checkpoints import random_prompts, randomize
from families import FAMILIES, SHAPE
from hub_mistral import MINISTRAL_3_8B
from loaded_weights import load, tensors_of, weight_list
from paged_sequences import CPU, Sequences, make_decoder
from quantized_checkpoints import Way, fp8, quantized, stack_fp8
from tercet.model.checkpoint import open_model, read_config
from tercet.model.load import open_for
from tercet.triton_kernels.scaled_weight import ScaledWeight
from tercet.triton_kernels.widen import plain

_EYES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGE = {"image_size": 28, "patch_size": 14}
_PIXTRAL = {"model_type": "pixtral", "head_dim": 16, "hidden_act": "silu"}
_INTERNVIT = {"model_type": "internvl_vision"}
_KINDS: dict[str, tuple[Any, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (Gemma3Config, "gemma3", {"vision_use_head": False}, {"mm_tokens_per_image": 1}),
    "internvl": (InternVLConfig, "qwen2", _INTERNVIT, {"image_seq_length": 1, "tie_word_embeddings": False}),
    "mistral3": (Mistral3Config, "mistral", _PIXTRAL, {"tie_word_embeddings": False}),
}


@pytest.fixture(scope="module", params=_KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder as from the hub, and what transformers makes of it."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make(folder, request.param, _KINDS[request.param][1])


def make(folder: Path, name: str, family: str) -> Any:
    """With a language model of this family."""
    kind, _, eyes, more = _KINDS[name]
    text_kind, settings = FAMILIES[family]
    alike = {"final_logit_softcapping": None} if family == "gemma3" else {"tie_word_embeddings": False}
    text = text_kind(**{**SHAPE, **settings, **alike})
    config = kind(text_config=text.to_dict(), vision_config={**_EYES, **_IMAGE, **eyes}, **more)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomize(whole, torch.Generator().manual_seed(3))
    whole.save_pretrained(folder)
    return whole


@pytest.mark.parametrize("sees", [True, False])
def test_logits_are_those_of_the_whole(model: tuple[Path, Any], sees: bool, caplog: pytest.LogCaptureFixture) -> None:
    folder, whole = model
    with caplog.at_level(logging.WARNING):
        opened = open_for(folder, CPU, sees=sees)
    assert (opened.vision is not None) == sees
    assert ("only the language model is served" in caplog.text) != sees
    check_logits(folder, whole)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *(("internvl", family) for family in ("llama", "qwen3", "qwen3-moe", "gpt-oss")),
        *(("mistral3", family) for family in ("ministral3", "mistral4")),
    ],
)
def test_all_language_models_beside_one_kind_of_eyes(name: str, family: str, tmp_path: Path) -> None:
    check_logits(tmp_path, make(tmp_path, name, family))


def check_logits(folder: Path, whole: Any) -> None:
    (ids,) = random_prompts(1, 40, 40, seed=9)
    with torch.inference_mode():
        wanted_TV = whole(input_ids=torch.tensor([ids])).logits[0]
    run = Sequences(make_decoder(folder), 1)
    got = [run.step({}, {0: ids[:-3]})[0], *(run.step({0: token}, {})[0] for token in ids[-3:])]
    wanted = wanted_TV[-4:]
    torch.testing.assert_close(torch.stack(got), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_what_sees_is_not_supported(model: tuple[Path, Any], tmp_path: Path) -> None:
    raw = json.loads((model[0] / "config.json").read_text())
    raw["vision_config"]["hidden_act"] = "relu"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert open_for(tmp_path, CPU, dummy_seed=1).vision is None
    with pytest.raises(ValueError, match=r"hidden_act is 'relu'.*serves text alone"):
        open_for(tmp_path, CPU, dummy_seed=1, sees=True)


def test_both_kinds_of_names(model: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = model
    tensors = load_file(folder / "model.safetensors")
    inside = ("language_model.model.", "vision_tower.", "multi_modal_projector.")
    renamed = {
        "model." + name.replace("language_model.model.", "language_model.")
        if name.startswith(inside)
        else name.removeprefix("language_model."): tensor
        for name, tensor in tensors.items()
    }
    assert not set(renamed) & set(tensors)
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    one, other = load(folder), load(tmp_path)
    assert torch.equal(one.lm_head_VD, other.lm_head_VD)
    for ours, theirs in zip(one.layers, other.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(ours), tensors_of(theirs), strict=True))


def test_it_may_be_quantized(model: tuple[Path, Any], tmp_path: Path) -> None:
    """And what looks at images, too; what is in FP8 may be kept so."""
    folder, _ = model
    stored, meant = quantized(
        folder, Way({"quant_method": "fp8", "weight_block_size": [16, 64]}, fp8(16, 64)), tmp_path
    )
    wanted = weight_list(load(meant))
    for kept in (False, True):
        found = weight_list(load(stored, kept=kept))
        assert any(isinstance(weight, ScaledWeight) for weight in found) == kept
        assert all(torch.equal(plain(ours), theirs) for ours, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("family", "block"), [("ministral3", None), ("mistral4", None), ("mistral4", [8, 64])])
def test_as_mistral_stores_it(family: str, block: list[int] | None, tmp_path: Path) -> None:
    """In FP8, one scale for each matrix and one for what it is multiplied by, but for what sees; all experts of a layer
    in one tensor. And as others store it, with scales of blocks."""
    make(tmp_path / "made", "mistral3", family)
    way = Way(
        {**MINISTRAL_3_8B["quantization_config"], "weight_block_size": block},
        fp8(*(block or (0, 0)), dtype=torch.bfloat16),
    )
    stored, meant = quantized(tmp_path / "made", way, tmp_path, wanted=lambda name: "language_model" in name)
    stack_fp8(stored, meant, way)
    wanted = weight_list(load(meant))
    for kept in (False, True):
        found = weight_list(load(stored, kept=kept))
        assert any(isinstance(weight, ScaledWeight) for weight in found) == kept
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(plain(ours).view(theirs.shape), theirs)


@pytest.mark.parametrize("rows", [16, 24])
def test_experts_whose_blocks_hold_rows_of_two_matrices(rows: int, tmp_path: Path) -> None:
    """Of 80 rows a half, in blocks of 16, and of as many that do not fill the last one."""
    make(tmp_path / "made", "mistral3", "mistral4")
    way = Way({**MINISTRAL_3_8B["quantization_config"], "weight_block_size": [rows, 64]}, fp8(rows, 64))
    stored, meant = quantized(tmp_path / "made", way, tmp_path, wanted=lambda name: "language_model" in name)
    stack_fp8(stored, meant, way)
    with pytest.raises(ValueError, match="want as many rows of gate_proj and of up_proj, in whole blocks"):
        load(stored)


def test_the_type_of_all_is_that_of_the_embedding(model: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = model
    raw = json.loads((folder / "config.json").read_text())
    del raw["dtype"], raw["text_config"]["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    halves = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(halves, tmp_path / "model.safetensors")
    assert read_config(tmp_path).dtype is None
    assert open_model(tmp_path)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "model_type is 'gemma2'"),
        ({"text_config": None}, "text_config is None"),
        ({"text_config": {"model_type": "gemma2"}}, "wants one of model_type"),
        ({"text_config": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping is 30.0; supported for"),
    ],
)
def test_refusals(model: tuple[Path, Any], changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    raw = json.loads((model[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **changes}))
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_files_with_code_of_their_own(tmp_path: Path) -> None:
    raw = {"architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "llm_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"InternVLChatModel.* want the same model .* whose name ends in -hf"):
        read_config(tmp_path)


def test_other_tensors_are_not_passed_over(model: tuple[Path, Any], tmp_path: Path) -> None:
    tensors = load_file(model[0] / "model.safetensors")
    save_file({**tensors, "audio_tower.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((model[0] / "config.json").read_text())
    with pytest.raises(ValueError, match=r"tensors not part of this model: audio_tower\.weight"):
        load(tmp_path)
