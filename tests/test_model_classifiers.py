"""Checkpoints with a head that classifies: what of them is read, and what is said of those that cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from classifiers import classifier
from loaded_weights import load
from paged_sequences import Sequences, make_decoder
from tercet.ipc.answers import Classifier
from tercet.model.checkpoint import open_model, read_config
from tercet.model.load import open_for


def rewrite(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "olmo2", "seed-oss", "gemma2", "gemma3"]
FAMILIES += ["qwen3-moe", "deepseek-v2", "deepseek-v3", "minicpm3", "glm", "glm4"]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    model = classifier(family, tmp_path, seed=len(family), num_labels=3, final_logit_softcapping=None)
    config, _ = open_model(tmp_path)
    assert not config.generates
    assert config.classifier == Classifier(("LABEL_0", "LABEL_1", "LABEL_2"), "softmax")
    ids = list(range(3, 40))
    decoder = make_decoder(tmp_path)
    assert torch.equal(decoder.score_head.rows_LD, model.score.weight.double())
    with torch.inference_mode():
        hidden_D = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
    (got,) = Sequences(decoder, 1).step({}, {0: ids})  # the embedding stands in for a head, and says all of it
    wanted = hidden_D @ model.model.embed_tokens.weight.detach().T
    got = got * config.logits_scaling  # which is for logits of tokens
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("said", "labels", "activation"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"num_labels": 1}, ("LABEL_0",), "sigmoid"),
        ({"id2label": {"1": "no", "0": "yes"}}, ("yes", "no"), "softmax"),
        ({"id2label": {"0": "yes"}, "problem_type": "regression"}, ("yes",), "none"),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        ({"problem_type": "single_label_classification"}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.Identity"}}, ("LABEL_0",), "none"),
    ],
)
def test_what_config_json_says(said: dict[str, Any], labels: tuple[str, ...], activation: Any, tmp_path: Path) -> None:
    classifier("qwen3", tmp_path, seed=1, num_labels=2)
    rewrite(tmp_path, **said)
    assert read_config(tmp_path).classifier == Classifier(labels, activation)
    assert open_for(tmp_path, torch.device("cpu"), dummy_seed=1).config.classifier == Classifier(labels, activation)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"num_labels": 0}, "num_labels is 0; want a positive whole number"),
        ({"id2label": {"0": "a", "2": "b"}}, "id2label is .*; want a label for each number from 0 on"),
        ({"id2label": {"0": "a"}, "num_labels": 2}, "id2label is .*; want a label for each number"),
        ({"id2label": ["a"]}, "id2label is"),
        ({"problem_type": "other"}, "problem_type is 'other'; supported: 'multi_label_classification'"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, r"activation_fn is 'torch\.nn\.Tanh'"),
        ({"architectures": ["OlmoeForSequenceClassification"]}, "architectures is"),
    ],
)
def test_refusals(said: dict[str, Any], words: str, tmp_path: Path) -> None:
    classifier("qwen3", tmp_path, seed=1)
    rewrite(tmp_path, **said)
    with pytest.raises(ValueError, match=words):
        read_config(tmp_path)


def test_a_head_that_does_not_fit(tmp_path: Path) -> None:
    classifier("llama", tmp_path, seed=1, num_labels=3)
    rewrite(tmp_path, id2label={"0": "a"})
    with pytest.raises(ValueError, match=r"score\.weight \[3, 64\] \(want \[1, 64\]\)"):
        load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensors missing: score\.weight"):
        load(tmp_path)
