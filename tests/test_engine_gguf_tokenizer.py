"""GGUF files that are damaged, or whose tokenizer is another: refused in words that name what came."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from tercet.engine.errors import UnsupportedModel
from tercet.engine.generation_defaults import GenerationDefaults, defaults_of_gguf
from tercet.engine.gguf_metadata import read_metadata
from tercet.engine.gguf_tokenizer import build_tokenizer
from tercet.engine.model_files import demo_model
from tercet.engine.text_codec import GGUF_ARCHITECTURES, load_codec
from tercet.ipc.messages import ChatMessage, ChatOptions
from tercet.model.gguf_names import ARCHITECTURES

GGUF_TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.merges": ["a b"],
}


@pytest.mark.parametrize("size", [0, 3, 20, 100, 5000, 10**6])
def test_truncated_gguf_files(tmp_path: Path, size: int) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(demo_model().read_bytes()[:size])
    with pytest.raises(UnsupportedModel, match=r"broken\.gguf"):
        load_codec(broken)


def test_damaged_gguf_files(tmp_path: Path) -> None:
    """Any damage to the first part of the file is an error that names it, or no damage to the tokenizer's part."""
    head = demo_model().read_bytes()[:2000]
    rng = random.Random(0)
    broken = tmp_path / "broken.gguf"
    num_refused = 0
    for _ in range(300):
        damaged = bytearray(head)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(60)] = rng.randrange(256)
        broken.write_bytes(damaged)
        with pytest.raises(UnsupportedModel, match=r"broken\.gguf"):
            read_metadata(broken)
        num_refused += 1
    assert num_refused == 300


def test_one_part_of_a_split_gguf_file(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=1)
    writer.add_tokenizer_model("gpt2")
    for name in ("token_embd.weight", "output_norm.weight"):
        writer.add_tensor(name, np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 2
    for part in parts:
        with pytest.raises(UnsupportedModel, match=f"{part.name} is one of 2 parts; want them merged"):
            load_codec(part)


@pytest.mark.parametrize(("architecture", "name"), [("deepseek2", "deepseek-v3"), ("minicpm3", "default")])
def test_a_gguf_file_of_another_architecture(architecture: str, name: str, tmp_path: Path) -> None:
    """Is refused for that, and not for its tokenizer."""
    writer = GGUFWriter(tmp_path / "model.gguf", architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=f"architecture is '{architecture}'; supported: llama, qwen2"):
        load_codec(tmp_path / "model.gguf")


def test_the_gguf_architectures_are_the_model_s() -> None:
    assert tuple(ARCHITECTURES) == GGUF_ARCHITECTURES


def test_what_ends_a_text_of_a_gguf_file(tmp_path: Path) -> None:
    """Llama 3 ends texts, turns and messages to its tools with a token each; of Gemma's files many name the first."""
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", "<text>", "<turn>", "<message>", "<end_of_turn>", "<|end|>"])
    writer.add_token_types([1, 1, 1, 3, 3, 3, 3, 1])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(3)
    writer.add_eot_token_id(4)
    writer.add_eom_token_id(5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert load_codec(tmp_path / "model.gguf").eos_ids == (3, 4, 5, 6)


def test_generation_defaults_of_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As llama.cpp converts generation_config.json."""
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_merges(["a b"])
    writer.add_sampling_temp(0.5)
    writer.add_sampling_top_k(20)
    writer.add_sampling_top_p(0.75)
    writer.add_sampling_min_p(0.125)
    writer.add_sampling_penalty_repeat(1.5)
    writer.add_sampling_penalty_last_n(64)
    writer.add_sampling_mirostat(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    wanted = GenerationDefaults(temperature=0.5, top_k=20, top_p=0.75, min_p=0.125, repetition_penalty=1.5)
    assert load_codec(tmp_path / "model.gguf").defaults == wanted
    assert capsys.readouterr().err == "warning: general.sampling: not used: penalty_last_n\n"


def test_generation_defaults_of_a_wrong_type(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"a\.gguf: general\.sampling: .*`str` - at `\$\.temperature`"):
        defaults_of_gguf({"general.sampling.temp": "hot"}, "a.gguf")


def test_what_ends_a_text_in_the_harmony_format(tmp_path: Path) -> None:
    """Whatever the file says: `<|end|>` ends one message of several."""
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", "<|return|>", "<|end|>", "<|channel|>", "<|call|>"])
    writer.add_token_types([1, 1, 1, 3, 3, 3, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(3)
    writer.add_eot_token_id(4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert load_codec(tmp_path / "model.gguf").eos_ids == (3, 6)


def test_templates_of_a_gguf_file(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_merges(["a b"])
    named = {"default": "a", "rag": "{% broken", "tool_use": "b{% if tools %}{% endif %}"}
    writer.add_chat_template([{"name": name, "template": source} for name, source in named.items()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    codec = load_codec(tmp_path / "model.gguf")
    assert list(codec.encode_chat([ChatMessage("user", "x")])) == [0]
    assert list(codec.encode_chat([ChatMessage("user", "x")], ChatOptions(tools=({"type": "function"},)))) == [1]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("merges", None, "merges None; want a list of str, as .*'gpt2' needs it"),
        ("merges", [5], r"merges \[5\]; want a list of str"),
        ("merges", ["ab"], "merges has 'ab'; want two tokens"),
        ("merges", ["a c"], "no byte-level BPE: .*`c`"),
        ("tokens", None, "tokens None; want a list of str"),
        ("tokens", [], "no byte-level BPE"),
        ("token_type", [1], "1 tokenizer.ggml.token_type; want 3"),
        ("token_type", 7, "token_type 7; want a list of int"),
    ],
)
def test_gguf_tokenizers_that_lack_a_part(key: str, value: Any, words: str) -> None:
    metadata = {**GGUF_TOKENIZER, f"tokenizer.ggml.{key}": value}
    if value is None:
        del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(UnsupportedModel, match=words):
        build_tokenizer(metadata)


@pytest.mark.parametrize(("key", "value"), [("model", "bert"), ("model", "t5"), ("pre", "unheard-of"), ("pre", None)])
def test_unknown_gguf_tokenizers_are_refused_by_name(key: str, value: str | None) -> None:
    metadata = dict(GGUF_TOKENIZER)
    assert build_tokenizer(dict(metadata)).encode("ab").ids == [2]
    metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(UnsupportedModel, match=repr(value)):
        build_tokenizer(metadata)
