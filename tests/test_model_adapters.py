"""Tokens of several adapters in one step against transformers with each merged into the weights; and bad folders."""

import json
import re
import subprocess
import sys
from pathlib import Path
from random import SystemRandom

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_folders import PREFIX, linear_modules, make_adapter, merged_model, says
from checkpoints import checkpoint, greedy, random_prompts
from covering import long
from paged_sequences import Sequences, make_decoder
from tercet.model.adapter_file import AdapterFile
from tercet.model.adapters import ranks_of
from tercet.model.checkpoint import read_config

FAMILIES = ["llama", "llama-bias-tied", "qwen3", "phi3", "gemma2", "gemma3", "gemma4", "olmo2", "granite", "qwen3-moe"]
FAMILIES += ["mixtral", "ernie4.5", "deepseek-v3", "minicpm3", "qwen3.5", "qwen3-next", "glm4"]
FAMILIES += [long("gemma4-told"), long("gemma4-moe")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["reordered", "fused"])
def test_rows_of_one_step_go_through_their_own(family: str, layout: str, tmp_path: Path) -> None:
    path, seed = checkpoint(family), SystemRandom().randrange(10**6)
    folders = [
        make_adapter(tmp_path / "a", path, seed),
        make_adapter(tmp_path / "b", path, seed + 1, wanted=lambda name: "self_attn" in name, use_rslora=True),
        make_adapter(tmp_path / "c", path, seed + 2, wanted=lambda name: "layers.1." in name, dtype=torch.bfloat16),
    ]
    adapters = [1, -1, 0, 2, 1]
    prompts = random_prompts(len(adapters), 3, 60, seed=seed)
    run = Sequences(make_decoder(path, layout=layout, adapters=folders), len(adapters), whole=True, adapters=adapters)
    got = run.greedy(prompts, 6)
    models = [merged_model(path, None if adapter < 0 else folders[adapter]) for adapter in adapters]
    assert all(map(says, models, prompts, got)), seed
    bare = greedy(merged_model(path, None), prompts, 6)
    differ = [ours != plain for ours, plain in zip(got, bare, strict=True)]
    # Some may happen to say the same, as those of attention alone where few layers attend.
    assert sum(differ) >= 2, seed
    assert not differ[1]


@pytest.mark.parametrize(
    ("family", "size"),
    [("llama", 2), long("llama", 4), long("deepseek-v3", 2), long("qwen3-next", 2), long("qwen3.5", 2)],
)
def test_ranks_share_an_adapter(family: str, size: int, tmp_path: Path) -> None:
    """With fewer KV heads than ranks, too."""
    path = checkpoint(family)
    folder = make_adapter(tmp_path / "a", path, 5)
    (prompt,) = random_prompts(1, 40, 40, seed=size)
    script = Path(__file__).with_name("adapter_rank.py")
    arguments = [str(tmp_path / "meeting"), str(path), str(folder), json.dumps(prompt)]
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), str(size), *arguments], stdout=subprocess.PIPE)
        for rank in range(size)
    ]
    answers = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    assert answers == [[greedy(merged_model(path, folder), [prompt], 6)[0]]] * size


def changed(folder: Path, **settings: object) -> Path:
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **settings}))
    return folder


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', which is not supported; want 'LORA'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"kasa_config": {"beta": 1}}, "kasa_config is {'beta': 1}"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"init_lora_weights": "pissa_niter_16"}, "want it converted to plain LoRA"),
        ({"r": 0}, "r is 0; want a positive whole number"),
        ({"r": 1000}, "r is 1000; want 512 at most"),
        ({"lora_alpha": "x"}, "lora_alpha is 'x'"),
        ({"rank_pattern": {"(": 3}}, "want a regular expression"),
        ({"alpha_pattern": {"q_proj": -1}}, "alpha_pattern has -1"),
        ({"rank_pattern": {"_proj": 3}}, "of rank 3, as adapter_config.json says"),
    ],
)
def test_settings_that_make_other_numbers_are_refused(settings: dict[str, object], words: str, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path, checkpoint("llama"), 1)
    if "rank_pattern" in settings and "_proj" in str(settings):
        settings = {"rank_pattern": {r".*_proj": 3}}
    with pytest.raises(ValueError, match=words):
        AdapterFile(changed(folder, **settings))


def test_settings_that_nobody_knows_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """But not those that say nothing, nor those of training."""
    folder = make_adapter(tmp_path, checkpoint("llama"), 1)
    AdapterFile(changed(folder, new_way=None, lora_dropout=0.1, peft_version="9"))
    assert not caplog.messages
    AdapterFile(changed(folder, new_way={"strength": 3}))
    assert caplog.messages == [f"{folder}/adapter_config.json: not known, and not used: new_way"]


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        (f"{PREFIX}lm_head.lora_A.weight", (8, 64), "lm_head.lora_A.weight is not supported; want only lora_A"),
        (f"{PREFIX}model.layers.0.mlp.experts.1.up_proj.lora_A.weight", (8, 64), "is not supported; want only lora_A"),
        (f"{PREFIX}model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight", (8, 64), "is not supported"),
        (f"{PREFIX}model.layers.7.self_attn.q_proj.lora_A.weight", (8, 64), "is alone; want lora_A and lora_B"),
    ],
)
def test_tensors_that_nothing_here_adds_are_refused(
    name: str, shape: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path, checkpoint("llama"), 1)
    file = folder / "adapter_model.safetensors"
    save_file({**load_file(file), name: torch.zeros(shape)}, file)
    with pytest.raises(ValueError, match=words):
        AdapterFile(folder)


@pytest.mark.parametrize(
    ("module", "sizes", "words"),
    [
        ("model.layers.9.self_attn.q_proj", (64, 64), "fits no linear layer; want modules self_attn.q_proj, "),
        ("model.layers.0.self_attn.qkv_proj", (128, 64), "fits no linear layer"),
        ("model.layers.0.self_attn.k_proj", (64, 64), r"change a matrix \[64, 64\]; the model's is \[32, 64\]"),
    ],
)
def test_an_adapter_of_another_model_is_refused(
    module: str, sizes: tuple[int, int], words: str, tmp_path: Path
) -> None:
    path = checkpoint("llama")
    folder = make_adapter(tmp_path, path, 1, wanted=lambda name: name == "model.layers.2.mlp.up_proj")
    file = folder / "adapter_model.safetensors"
    pair = {"A": torch.zeros(8, sizes[1]), "B": torch.zeros(sizes[0], 8)}
    save_file({**load_file(file), **{f"{PREFIX}{module}.lora_{name}.weight": pair[name] for name in pair}}, file)
    with pytest.raises(ValueError, match=words):
        ranks_of([AdapterFile(folder)], read_config(path))


def test_dense_modules_of_a_layer_with_experts_are_refused(tmp_path: Path) -> None:
    path = checkpoint("llama")
    folder = make_adapter(tmp_path, path, 1, wanted=lambda name: name.endswith("mlp.down_proj"))
    assert any("mlp.down_proj" in name for name in linear_modules(path))
    with pytest.raises(ValueError, match="fits no linear layer"):
        ranks_of([AdapterFile(folder)], read_config(checkpoint("qwen3-moe")))


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("deepseek-v3", "self_attn.q_a_proj"),
        ("deepseek-v3", "self_attn.q_b_proj"),
        ("deepseek-v3", "self_attn.kv_a_proj_with_mqa"),
        ("deepseek-v3", "self_attn.kv_b_proj"),
        ("deepseek-v3", "mlp.gate_proj"),  # of a layer with experts
        ("deepseek-v2", "self_attn.q_proj"),
    ],
)
def test_what_makes_latents_is_left_to_the_model(family: str, module: str, tmp_path: Path) -> None:
    path = checkpoint(family)
    folder = make_adapter(tmp_path, path, 1, wanted=lambda name: name == "model.layers.2.self_attn.o_proj")
    ranks_of([AdapterFile(folder)], read_config(path))
    file, name = folder / "adapter_model.safetensors", f"{PREFIX}model.layers.1.{module}.lora_{{}}.weight"
    num_out, num_in = (
        load_file(path / "model.safetensors").get(f"model.layers.1.{module}.weight", torch.empty(96, 64)).shape
    )
    pair = {name.format("A"): torch.zeros(8, num_in), name.format("B"): torch.zeros(num_out, 8)}
    save_file({**load_file(file), **pair}, file)
    dense = "self_attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj of layers 0 to 2, and no experts"
    with pytest.raises(ValueError, match=re.escape(f"{name.format('A')} fits no linear layer; want modules {dense}")):
        ranks_of([AdapterFile(folder)], read_config(path))


def test_other_spellings_of_names_are_the_same(tmp_path: Path) -> None:
    """Of models without a head, of those that also see, and of PEFT before it left its own name out."""
    path = checkpoint("llama")
    folder = make_adapter(tmp_path, path, 1)
    tensors = load_file(folder / "adapter_model.safetensors")
    wanted = AdapterFile(folder).pairs.keys()
    for begin in ("layers.", "language_model.model.layers.", "model.language_model.layers."):
        renamed = {
            name.replace("model.layers.", begin).replace(".weight", ".default.weight"): tensor
            for name, tensor in tensors.items()
        }
        save_file(renamed, folder / "adapter_model.safetensors")
        assert AdapterFile(folder).pairs.keys() == wanted
