"""Models saved without what makes logits, as those that embed texts are: transformers' hidden states, and a word that
nothing is to be generated."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import checkpoint, random_prompts
from converted import convert
from headless import headless
from loaded_weights import load
from paged_sequences import Sequences, make_decoder
from tercet.model.checkpoint import open_model, read_config
from tercet.model.load import open_for


def rewrite(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("family", ["llama-mha-head-dim", "mistral", "qwen3", "gemma3", "qwen3-moe", "glm4-moe-lite"])
def test_hidden_states_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = headless(family, tmp_path, seed=6)
    (ids,) = random_prompts(1, 43, 43, seed=len(family))
    with torch.inference_mode():
        hidden_TD = model(torch.tensor([ids])).last_hidden_state[0]
    assert not open_model(tmp_path)[0].generates
    run = Sequences(make_decoder(tmp_path), 1)
    got = torch.stack([run.step({}, {0: ids[:37]})[0], run.step({}, {0: ids[37:]})[0]])
    # Which has as many numbers as say what the hidden state is: the embedding stands in.
    wanted = hidden_TD[[36, 42]] @ model.embed_tokens.weight.detach().T
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_what_says_that_there_is_no_head(tmp_path: Path) -> None:
    model = headless("qwen3", tmp_path, seed=7)
    assert not read_config(tmp_path).generates  # no weights are needed for that
    assert not open_for(tmp_path, torch.device("cpu"), dummy_seed=1).config.generates
    rewrite(tmp_path, architectures=["Qwen3ForCausalLM"])
    config, _ = open_model(tmp_path)
    assert not config.generates
    rewrite(tmp_path, tie_word_embeddings=True)
    assert open_model(tmp_path)[0].generates
    rewrite(tmp_path, tie_word_embeddings=False, architectures=["Qwen3Model"])
    head_VD = torch.randn_like(model.embed_tokens.weight)
    save_file({**load_file(tmp_path / "model.safetensors"), "lm_head.weight": head_VD}, tmp_path / "model.safetensors")
    assert open_model(tmp_path)[0].generates
    assert torch.equal(load(tmp_path).lm_head_VD, head_VD)


def test_a_lost_head_is_missed(tmp_path: Path) -> None:
    """Where all other names are those of a model with one."""
    tensors = load_file(checkpoint("llama") / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if name != "lm_head.weight"}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((checkpoint("llama") / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"tensors missing: lm_head\.weight"):
        load(tmp_path)


def test_gguf_files_for_embeddings(tmp_path: Path) -> None:
    tied = convert(checkpoint("qwen3"), tmp_path / "tied.gguf")
    assert read_config(tied).generates
    embeds = convert(checkpoint("qwen3"), tmp_path / "embeds.gguf", settings={"pooling_type": 3})
    assert not read_config(embeds).generates
    seen = convert(checkpoint("qwen3"), tmp_path / "both_ways.gguf", settings={"attention.causal": False})
    with pytest.raises(ValueError, match=r"qwen3\.attention\.causal is False; supported: True"):
        read_config(seen)
