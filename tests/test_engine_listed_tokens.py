"""Tokens that are listed beside tokenizer.json: the ids are those of transformers."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tercet.engine.errors import UnsupportedModel
from tercet.engine.text_codec import load_codec
from tercet.ipc.messages import ChatMessage
from tokenizer_process import byte_checkpoint

NEW = {"content": "<new>", "special": False, "normalized": False}
"""Behind `</s>`, which is token 256; `b` is 65."""
WIDE = {"content": "</s>", "special": True, "normalized": False, "lstrip": True, "rstrip": True}


def folder_of(folder: Path, settings: dict[str, Any], files: dict[str, Any]) -> Path:
    path = byte_checkpoint(folder)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("settings", "files", "special_ids"),
    [
        ({"added_tokens_decoder": {"257": NEW}}, {}, {256}),
        ({"added_tokens_decoder": {"258": {**NEW, "content": "b"}, "257": {**NEW, "special": True}}}, {}, {256, 257}),
        ({"added_tokens_decoder": {"256": WIDE}}, {}, {256}),
        ({}, {"added_tokens.json": {"<new>": 257, "</s>": 256}}, {256}),
        ({"additional_special_tokens": ["<new>"]}, {"added_tokens.json": {"<new>": 257}}, {256, 257}),
        ({"additional_special_tokens": ["b"]}, {}, {65, 256}),
        ({"extra_special_tokens": {"begin": "b"}, "additional_special_tokens": ["a"]}, {}, {65, 256}),
        ({}, {"special_tokens_map.json": {"extra_special_tokens": ["b"]}}, {65, 256}),
    ],
)
def test_as_transformers(
    settings: dict[str, Any], files: dict[str, Any], special_ids: set[int], tmp_path: Path
) -> None:
    path = folder_of(tmp_path, settings, files)
    codec, theirs = load_codec(path), PreTrainedTokenizerFast.from_pretrained(path)
    rng = random.Random(2)
    for _ in range(20):
        text = "".join(rng.choices(["<new>", "</s>", " ", "a", "b", "ü"], k=rng.randint(1, 13)))
        assert list(codec.encode(text)) == theirs(text).input_ids
    assert codec.pieces is not None
    assert codec.pieces.special_ids == special_ids


def test_templates_know_what_settings_name(tmp_path: Path) -> None:
    template = "{{ eot_token }}{{ messages[0].content }}{{ picture }}{{ eos_token }}"
    settings = {"eot_token": "b", "extra_special_tokens": {"picture": "c"}, "chat_template": template}
    path = folder_of(tmp_path, settings, {})
    theirs = PreTrainedTokenizerFast.from_pretrained(path)
    wanted = theirs.apply_chat_template([{"role": "user", "content": "a"}])["input_ids"]
    assert list(load_codec(path).encode_chat([ChatMessage("user", "a")])) == wanted
    assert len(wanted) == 4


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"added_tokens_decoder": {"300": NEW}}, "lists '<new>' as token 300, which .* does not have; want 257"),
        ({"added_tokens_decoder": [5]}, r"tokenizer_config\.json has added tokens that cannot be read"),
        ({"added_tokens_decoder": {"x": NEW}}, r"added tokens that cannot be read: invalid literal"),
    ],
)
def test_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        load_codec(folder_of(tmp_path, settings, {}))
