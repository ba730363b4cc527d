"""What an operator says in place of the checkpoint: how prompts of conversations are made, and what holds where a
request says nothing."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tercet.engine.config import EngineConfig
from tercet.engine.errors import StartupFailed, UnsupportedModel
from tercet.engine.generation_defaults import GenerationDefaults
from tercet.engine.rules import make_rules
from tercet.engine.text_codec import OwnTemplates, load_codec
from tercet.ipc.messages import ChatMessage, ChatOptions, SamplingParams
from tercet.ipc.process_messages import Limits
from test_engine_text_codec import rewrite
from tokenizer_process import byte_checkpoint
from whole_engine import tiny_engine

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{{ tools | tojson }}"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Größe?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def test_a_file_makes_prompts(tmp_path: Path) -> None:
    """With tools, too, though the checkpoint has a template of its own for these; as transformers does with it."""
    folder, file = byte_checkpoint(tmp_path), tmp_path / "mine.jinja"
    file.write_text(TEMPLATE)
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("not this one")
    codec, theirs = load_codec(folder, OwnTemplates(chat=str(file))), AutoTokenizer.from_pretrained(folder)
    messages = [ChatMessage(one["role"], one["content"]) for one in MESSAGES]
    for tools in ((), (TOOL,)):
        wanted = theirs.apply_chat_template(MESSAGES, chat_template=TEMPLATE, tools=list(tools) or None)
        assert list(codec.encode_chat(messages, ChatOptions(tools=tools))) == wanted["input_ids"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"{% if %}", "cannot be used: Expected an expression"),
    ],
)
def test_files_that_are_refused(source: bytes | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    if source is not None:
        file.write_bytes(source)
    with pytest.raises(UnsupportedModel, match=f"^--chat-template: .*mine.jinja {words}"):
        load_codec(byte_checkpoint(tmp_path), OwnTemplates(chat=str(file)))


def test_a_template_with_no_tokenizer(ids_only_model: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"--chat-template: .* has no tokenizer"):
        load_codec(ids_only_model, OwnTemplates(chat="x"))


def defaults(folder: Path, **options: Any) -> GenerationDefaults:
    limits = Limits(3, 64, 1000, "float32", "cpu", 8)
    return make_rules(load_codec(folder), limits, EngineConfig(model="tiny", **options)).defaults


def test_defaults_in_place_of_the_checkpoint_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = byte_checkpoint(tmp_path)
    rewrite(folder / "generation_config.json", {"temperature": 0.5, "top_k": 7})
    own = {"temperature": 0, "stop_strings": ["END"]}
    assert defaults(folder) == GenerationDefaults(temperature=0.5, top_k=7)
    assert "defaults of the checkpoint: temperature 0.5, top_k 7" in capsys.readouterr().err
    assert defaults(folder, generation_config="none") == GenerationDefaults()
    changed = GenerationDefaults(temperature=0, top_k=7, stop_strings=("END",))
    assert defaults(folder, override_generation_config=own) == changed
    assert "defaults with --override-generation-config: temperature 0, top_k 7" in capsys.readouterr().err
    alone = GenerationDefaults(temperature=0, stop_strings=("END",))
    assert defaults(folder, override_generation_config=own, generation_config="none") == alone
    with pytest.raises(UnsupportedModel, match=r"^--override-generation-config: top_p is 2"):
        defaults(folder, override_generation_config={"top_p": 2.0})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temprature": 1}, "got 'temprature'; want some of temperature, top_p, top_k, min_p"),
        ({"temperature": "hot"}, "got {'temperature': 'hot'}: Expected"),
        ("0.6", "got '0.6': Expected `object`, got `str`"),
    ],
)
def test_what_are_no_defaults(given: object, words: str) -> None:
    with pytest.raises(ValueError, match=f"^--override-generation-config {words}"):
        EngineConfig(model="tiny", override_generation_config=given)  # type: ignore[arg-type]


def test_in_an_engine(tmp_path: Path) -> None:
    """Both, as a user sees them; and a file that is not there ends the start."""
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    own = {"max_new_tokens": 3, "temperature": 0.0}
    with tiny_engine("qwen3", chat_template=str(file), override_generation_config=own) as llm:
        chat = [{"role": "user", "content": "the cat"}]
        (said,) = llm.chat(chat, SamplingParams(ignore_eos=True), use_tqdm=False)
        (plain,) = llm.generate(["the cat"], SamplingParams(ignore_eos=True), use_tqdm=False)
        assert said.outputs[0].token_ids == plain.outputs[0].token_ids
        assert len(said.outputs[0].token_ids) == 3
    with pytest.raises(StartupFailed, match=r"--chat-template: .*none\.jinja cannot be read"):
        tiny_engine("qwen3", chat_template=str(tmp_path / "none.jinja"))
