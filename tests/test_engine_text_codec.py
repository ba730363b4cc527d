"""What a checkpoint says about text, against transformers reading the same files."""

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tercet.engine.errors import UnsupportedModel
from tercet.engine.generation_defaults import GenerationDefaults
from tercet.engine.model_files import demo_model
from tercet.engine.text_codec import TextRefused, load_codec
from tercet.ipc.messages import ChatMessage, ChatOptions
from tokenizer_process import TEMPLATE, byte_checkpoint, byte_tokenizer

TEXTS = [
    "The capital of France is",
    "numbers 1234567 3.14, 0x1F; and 42",
    "  leading and  double   spaces \t tabs\n\n\nlines\r\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "naïve Größe 日本語 🦙👩‍👩‍👧 e\u0301",
    "don't I'LL we've",
    "def f(x):\n    return x**2  # comment",
    "",
]


def rewrite(file: Path, changes: dict[str, Any]) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | changes))


@pytest.mark.long
def test_demo_model_s_ids_are_transformers_ids() -> None:
    path = demo_model()
    codec = load_codec(path)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    rng = random.Random(0)
    letters = ["a", " ", "B", ".", "é", "\n", "'s"]
    texts = ["".join(rng.choice(letters) for _ in range(30)) for _ in range(200)]
    for text in [*TEXTS, *texts]:
        assert list(codec.encode(text)) == theirs(text).input_ids, text
    # transformers reads a GGUF file without the name of its word rules, and does not set each digit apart. SmolLM2's
    # own tokenizer.json does, which shows where a digit follows several spaces.
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    texts = ["".join(rng.choice([*letters, "7", "12"]) for _ in range(30)) for _ in range(200)]
    for text in [*TEXTS, *texts]:
        assert list(codec.encode(text)) == theirs(text).input_ids, text
    conversation = [("system", "be brief"), ("user", "What is 2+2?"), ("assistant", "4"), ("user", "And 3+3?")]
    for turns in (conversation[1:2], conversation):
        wanted = theirs.apply_chat_template(
            [{"role": role, "content": content} for role, content in turns], add_generation_prompt=True
        )
        wanted = wanted if isinstance(wanted, list) else wanted["input_ids"]
        assert list(codec.encode_chat([ChatMessage(*turn) for turn in turns])) == wanted
    assert codec.eos_ids == (theirs.eos_token_id,)
    assert codec.defaults == GenerationDefaults()


def llama_like(folder: Path) -> Path:
    """A tokenizer.json that begins every text with <s>."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>"}
    rewrite(folder / "tokenizer_config.json", {**settings, "chat_template": "{{ bos_token }}" + TEMPLATE})
    return folder


@pytest.mark.parametrize(
    "settings", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}]
)
def test_beginnings_as_transformers_makes_them(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = llama_like(tmp_path)
    rewrite(folder / "tokenizer_config.json", settings)
    codec = load_codec(folder)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    wanted = theirs("hé").input_ids
    assert list(codec.encode("hé")) == wanted == [257, 71, 127, 102]
    # The template's own <s> is the only one.
    chat = list(codec.encode_chat([ChatMessage("user", "x")]))
    assert chat == theirs.apply_chat_template([{"role": "user", "content": "x"}], tokenize=True)["input_ids"]
    assert chat.count(257) == 1


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": [5, 7, 5]}, {"eos_token_id": 9}, (5, 7, 256)),
        ({"eos_token_id": 5}, {}, (5, 256)),
        ({"eos_token_id": 0}, {"eos_token_id": 9}, (0, 256)),
        ({"eos_token_id": None}, {"eos_token_id": 0}, (0, 256)),
        ({}, {"eos_token_id": [9, 256]}, (9, 256)),
        ({}, {"text_config": {"eos_token_id": [9, 7]}}, (9, 7, 256)),
        ({}, {"eos_token_id": 5, "text_config": {"eos_token_id": 9}}, (5, 256)),
        ({}, {}, (256,)),
    ],
)
def test_what_ends_a_text(
    tmp_path: Path, generation: dict[str, Any], config: dict[str, Any], ends: tuple[int, ...]
) -> None:
    folder = byte_checkpoint(tmp_path)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert load_codec(folder).eos_ids == ends


def test_generation_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = byte_checkpoint(tmp_path)
    generation = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1, "do_sample": True}
    unused = {"num_beams": 1, "suppress_tokens": [7], "min_length": 3}
    rewrite(folder / "generation_config.json", {**generation, **unused, "stop_strings": ["a", "b"]})
    sampled = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}
    defaults = GenerationDefaults(**sampled, stop_strings=("a", "b"))  # type: ignore[arg-type]
    assert load_codec(folder).defaults == defaults
    assert "generation_config.json: not used: min_length, suppress_tokens\n" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["chat_template.jinja", "chat_template.json", "string", "list", "none"])
def test_where_a_template_may_be(tmp_path: Path, where: str) -> None:
    folder = byte_checkpoint(tmp_path, template=None)
    match where:
        case "chat_template.jinja":
            (folder / where).write_text(TEMPLATE)
            rewrite(folder / "tokenizer_config.json", {"chat_template": "the old place"})
        case "chat_template.json":
            (folder / where).write_text(json.dumps({"chat_template": TEMPLATE}))
        case "string":
            (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of images"}))
            rewrite(folder / "tokenizer_config.json", {"chat_template": TEMPLATE})
        case "list":
            named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
            rewrite(folder / "tokenizer_config.json", {"chat_template": named})
        case _:
            assert load_codec(folder).template is None
            return
    codec = load_codec(folder)
    ids = list(codec.encode_chat([ChatMessage("user", "x")]))
    assert byte_tokenizer().decode(ids) == "<|user|>x<|assistant|>"


@pytest.mark.parametrize(
    ("settings", "files"),
    [
        ({"rag": "rag", "tool_use": "with tools", "default": "default"}, {}),
        ({"rag": "rag", "default": "default"}, {}),
        ({"default": "old", "tool_use": "old with tools"}, {"chat_template": "default"}),
        ({"default": "old"}, {"chat_template": "default", "additional_chat_templates/tool_use": "with tools"}),
        ({}, {"chat_template": "old", "additional_chat_templates/default": "default"}),
    ],
)
def test_named_templates_as_transformers_uses_them(
    tmp_path: Path, settings: dict[str, str], files: dict[str, str]
) -> None:
    folder = byte_checkpoint(tmp_path, template=None)
    show = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    (folder / "additional_chat_templates").mkdir()
    for name, source in files.items():
        (folder / f"{name}.jinja").write_text(source + show)
    named = [{"name": name, "template": source + show} for name, source in settings.items()]
    changes = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": named}
    rewrite(folder / "tokenizer_config.json", changes)
    codec, theirs = load_codec(folder), AutoTokenizer.from_pretrained(folder)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    for tools in ((), (tool,)):
        wanted = theirs.apply_chat_template([{"role": "user", "content": "x"}], tools=list(tools) or None)["input_ids"]
        assert list(codec.encode_chat([ChatMessage("user", "x")], ChatOptions(tools=tools))) == wanted


def test_special_tokens_that_only_the_settings_call_special(tmp_path: Path) -> None:
    folder = tmp_path
    vocab = {**byte_tokenizer().get_vocab(), "</s>": 256}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    rewrite(folder / "tokenizer_config.json", {"eos_token": "</s>"})
    codec = load_codec(folder)
    assert codec.pieces is not None
    assert codec.pieces.special_ids == {256}
    assert list(codec.encode("a</s>")) == PreTrainedTokenizerFast.from_pretrained(folder)("a</s>").input_ids


@pytest.mark.parametrize("lists_added_tokens", [True, False])
def test_special_tokens_that_two_files_name(tmp_path: Path, lists_added_tokens: bool) -> None:
    folder = llama_like(tmp_path)
    rewrite(folder / "special_tokens_map.json", {"eos_token": "<s>", "bos_token": {"content": "</s>"}})
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if lists_added_tokens:
        settings["added_tokens_decoder"] = {
            "256": {"content": "</s>", "special": True},
            "257": {"content": "<s>", "special": True},
        }
    rewrite(folder / "tokenizer_config.json", settings)
    codec, theirs = load_codec(folder), AutoTokenizer.from_pretrained(folder)
    assert codec.eos_ids == (theirs.eos_token_id,) == ((256,) if lists_added_tokens else (257,))
    chat = list(codec.encode_chat([ChatMessage("user", "x")]))
    assert chat == theirs.apply_chat_template([{"role": "user", "content": "x"}], tokenize=True)["input_ids"]
    assert chat[0] == (257 if lists_added_tokens else 256)


def test_a_folder_without_a_tokenizer_serves_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    codec = load_codec(tmp_path)
    assert (codec.tokenizer, codec.template, codec.pieces, codec.eos_ids) == (None, None, None, (3,))
    assert "token ids" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["tekken.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"])
def test_a_folder_with_a_tokenizer_in_another_form(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(UnsupportedModel, match=f"has {file} but no tokenizer.json; want tokenizer.json"):
        load_codec(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer.json", '{"model": 5}', "tokenizer.json cannot be read"),
        ("tokenizer.json", '{"model": {"vocab": {}, "merges": []}}', "last id of the checkpoint's tokenizer is None"),
        ("tokenizer.json", '{"model": {"vocab": {"a": 99999999}, "merges": []}}', "is 99999999; want one from 0 to"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json holds a list; want an object"),
        ("tokenizer_config.json", "nonsense", "tokenizer_config.json cannot be read as JSON"),
        ("tokenizer_config.json", "[" * 10_000, "tokenizer_config.json cannot be read as JSON: maximum recursion"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat template default is a int; want text"),
        ("tokenizer_config.json", r'{"eos_token": "\ud800"}', "cannot be read as JSON: .*surrogates not allowed"),
        ("generation_config.json", '{"temperature": "hot"}', "generation_config.json: .*temperature"),
        ("generation_config.json", '{"eos_token_id": ["x"]}', "eos_token_id"),
        ("generation_config.json", '{"eos_token_id": true}', "eos_token_id True; want an id or a list of ids"),
        ("generation_config.json", '{"eos_token_id": false}', "eos_token_id False"),
        ("config.json", '{"eos_token_id": [2, true]}', "eos_token_id .*True"),
        ("tokenizer.json", None, "no tokenizer.json"),
        ("chat_template.jinja", "{% if %}", "chat template cannot be used"),
        ("chat_template.jinja", "{% if 1 %}" * 400 + "{% endif %}" * 400, "chat template cannot be used: maximum rec"),
        ("chat_template.jinja", "\udcff", r"chat_template\.jinja cannot be read as text"),
    ],
)
def test_broken_folders(tmp_path: Path, file: str, content: str | None, words: str) -> None:
    folder = byte_checkpoint(tmp_path)
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content, errors="surrogateescape")
    with pytest.raises(UnsupportedModel, match=words):
        load_codec(folder)


def test_a_text_that_the_tokenizer_cannot_encode(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"known": 0}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = load_codec(tmp_path)
    assert list(codec.encode("known known")) == [0, 0]
    with pytest.raises(TextRefused, match="tokenizer refused"):
        codec.encode("new")


def test_a_long_text_lets_other_threads_run() -> None:
    codec = load_codec(demo_model())
    text, begun = "naïve café 東京 123 " * 10_000, threading.Event()

    def encode() -> list[int]:
        begun.set()
        return list(codec.encode(text))

    with ThreadPoolExecutor() as pool:
        encoding = pool.submit(encode)
        begun.wait()
        num_turns = 0
        while not encoding.done():
            time.sleep(0.001)
            num_turns += 1
    assert num_turns > 10
    assert codec.tokenizer is not None
    assert encoding.result() == codec.tokenizer.encode(text).ids


def test_no_prompt_has_fewer_tokens_than_its_length_says() -> None:
    codec = load_codec(demo_model())
    assert codec.longest_token is not None
    longest = max((codec.tokenizer.id_to_token(i) for i in range(49152)), key=len)  # type: ignore[union-attr]
    for text in [*TEXTS, " " * 3000, longest.replace("Ġ", " ") * 20, "\n" * 3000]:
        assert len(codec.encode(text)) >= len(text.encode()) // codec.longest_token
