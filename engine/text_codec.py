"""All that a checkpoint says about text: its tokenizer, its chat template, what ends a text, default sampling, pooling.

It reads a folder or a GGUF file once, at start. A folder with no tokenizer at all serves token ids only.
"""

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import Tokenizer

from tercet.engine.chat_template import ChatTemplate, read_template
from tercet.engine.errors import UnsupportedModel
from tercet.engine.generation_defaults import GenerationDefaults, defaults_of_config, defaults_of_gguf
from tercet.engine.gguf_metadata import read_metadata
from tercet.engine.gguf_tokenizer import build_tokenizer
from tercet.engine.harmony import CALL, CHANNEL, END, RETURN
from tercet.engine.json_file import read_object
from tercet.engine.listed_tokens import add_listed, special_names
from tercet.engine.pair_template import PairTemplate
from tercet.engine.pieces import Pieces
from tercet.engine.pooling import Pooling, pooling_of_gguf, read_pooling
from tercet.engine.text_parts import TextParts, cut_tokens, frame, frame_fault
from tercet.ipc.messages import ChatMessage, ChatOptions

_SHORT_CHARACTERS = 2000
"""Encoded in about a millisecond."""

_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
"""They end a turn wherever a GGUF file has them, which often names what ends a text alone."""

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3", "smollm3", "granite", "olmo2", "gemma2", "gemma3", "qwen3moe")
"""Those of `model/gguf_names.py`, which no process but a worker loads."""

_OTHER_TOKENIZERS = ("tekken.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
"""They show that a folder has a tokenizer, in a form that is not read."""

_MOST_IDS = 2**24
"""Far more than any vocabulary has; the library takes memory for all ids up to the last."""


class OwnTemplates(NamedTuple):
    """Files of the operator's: `--chat-template` and `--pair-template`. None: as the checkpoint has it."""

    chat: str | None = None
    pair: str | None = None


_NONE = OwnTemplates()


class TextRefused(ValueError):
    """The tokenizer cannot encode this text; the message is what it said."""


@dataclass(frozen=True)
class TextCodec:
    """Text to ids and back, for one checkpoint."""

    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    parts: TextParts | None
    frame: "tuple[array[int], array[int]] | None"
    """What a plain prompt begins and ends with; None: not known."""
    pieces: Pieces | None
    eos_ids: tuple[int, ...]
    defaults: GenerationDefaults
    longest_token: int | None
    """No token covers more bytes of a prompt; None: not known."""
    pooling: Pooling
    """How an embedding is made."""
    pair_template: PairTemplate | None = None
    """What is written around a pair of texts; None: as tokenizer.json has it."""

    def encode(self, text: str, salt: str = "") -> "array[int]":
        """A plain prompt, begun as tokenizer.json says; as in transformers, `add_bos_token` cannot change that. `salt`:
        see `TextParts`."""
        assert self.tokenizer is not None
        assert self.parts is not None
        if self.frame is None:
            (ids,) = _encode(self.tokenizer, [text], add_special_tokens=True)
            return array("i", ids)
        begin, end = self.frame
        return begin + self.parts.encode(text, salt) + end

    def encode_pair(
        self, first: str, second: str, check: Callable[[str], None] = lambda text: None, salt: str = ""
    ) -> "array[int]":
        """Both, as tokenizer.json says of two texts, or as a template writes them; the rest as in `encode_chat`."""
        assert self.tokenizer is not None
        if self.pair_template is not None:
            assert self.parts is not None
            text = self.pair_template.render(first, second)
            check(text)
            return self.parts.encode(text, salt)
        if fault := frame_fault(self.tokenizer, "pair"):
            raise TextRefused(f"the tokenizer takes no pair of texts: {fault}")
        (ids,) = _encode(self.tokenizer, [(first, second)], add_special_tokens=True)
        return array("i", ids)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        options: ChatOptions | None = None,
        check: Callable[[str], None] = lambda text: None,
        salt: str = "",
        finish: Callable[[str], str] = lambda text: text,
    ) -> "array[int]":
        """A conversation; the template writes its own first token. `finish` may change what it has written, and `check`
        refuse that; `salt`: see `TextParts`."""
        assert self.template is not None
        assert self.parts is not None
        text = finish(self.template.render(messages, options or ChatOptions()))
        check(text)
        return self.parts.encode(text, salt)

    def token_ends(self, text: str) -> list[int]:
        """Where the tokens of a text by itself end in it, in characters."""
        assert self.tokenizer is not None
        (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=False)
        return [end for _, end in encoding.offsets]


def _encode(
    tokenizer: Tokenizer, texts: Sequence[str] | Sequence[tuple[str, str]], *, add_special_tokens: bool
) -> list[list[int]]:
    try:
        if sum(len("".join(text)) for text in texts) <= _SHORT_CHARACTERS:
            pairs = [(text, None) if isinstance(text, str) else text for text in texts]
            return [tokenizer.encode(one, pair, add_special_tokens=add_special_tokens).ids for one, pair in pairs]
        # It takes the library's threads, and no other thread of this process has to wait: `encode` lets none run, and
        # of a few megabytes the process would count as hung.
        return [one.ids for one in tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]
    except Exception as error:  # noqa: BLE001  the library raises plain Exception
        raise TextRefused(f"the tokenizer refused the prompt: {error}") from None


def load_codec(model_path: Path, own: OwnTemplates = _NONE) -> TextCodec:
    """Read what `model_path`, a folder or a GGUF file, says about text."""
    return _from_gguf(model_path, own) if model_path.is_file() else _from_folder(model_path, own)


def _from_gguf(path: Path, own: OwnTemplates) -> TextCodec:
    metadata = read_metadata(path)
    count = metadata.get("split.count", 1)
    if isinstance(count, int) and count > 1:  # only the first part has the tokenizer
        raise UnsupportedModel(f"{path} is one of {count} parts; want them merged (llama-gguf-split --merge)")
    # A worker would say the same, but later than its tokenizer is refused, which may be as strange.
    if (architecture := metadata.get("general.architecture")) not in GGUF_ARCHITECTURES:
        raise UnsupportedModel(f"{path}: architecture is {architecture!r}; supported: {', '.join(GGUF_ARCHITECTURES)}")
    tokenizer = build_tokenizer(metadata)
    names = {}
    for name, kind in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{kind}_token_id")
        token = tokenizer.id_to_token(token_id) if isinstance(token_id, int) else None
        if token is not None:
            names[f"{name}_token"] = token
    ends = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    special = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    if CHANNEL in special:  # there one ends a message, behind which others follow
        ends = [end for end in ends if end != special.get(END)]
    turn_ends = (RETURN, CALL) if CHANNEL in special else _TURN_ENDS
    ends += [special[name] for name in turn_ends if name in special]
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    return _codec(
        tokenizer,
        {name: str(metadata[key]) for name, key in keys.items() if metadata.get(key)},
        names,
        tuple(dict.fromkeys(end for end in ends if isinstance(end, int))),
        defaults_of_gguf(metadata, str(path)),
        pooling_of_gguf(metadata, path),
        own,
    )


def _ends_of_config(config: dict[str, Any]) -> Any:
    """What ends an answer, by the whole model or, where it is silent, by its part that speaks."""
    said, part = config.get("eos_token_id"), config.get("text_config")
    return part.get("eos_token_id") if said is None and isinstance(part, dict) else said


def _from_folder(folder: Path, own: OwnTemplates) -> TextCodec:
    generation = read_object(folder / "generation_config.json")
    said = generation.get("eos_token_id")
    ends = _ids(_ends_of_config(read_object(folder / "config.json")) if said is None else said)
    defaults = defaults_of_config(generation, str(folder / "generation_config.json"))
    settings = read_object(folder / "tokenizer_config.json")
    file = folder / "tokenizer.json"
    if not file.exists():
        if others := [name for name in _OTHER_TOKENIZERS if (folder / name).exists()]:
            raise UnsupportedModel(
                f"{folder} has {', '.join(others)} but no tokenizer.json; want tokenizer.json, the only form of a "
                "tokenizer that can be read"
            )
        if own.chat is not None:
            raise UnsupportedModel(f"--chat-template: {folder} has no tokenizer; want none of both, or both")
        print(f"{folder} has no tokenizer: only prompts of token ids are served", file=sys.stderr)
        defaults = msgspec.structs.replace(defaults, stop_strings=None)
        return TextCodec(None, None, None, None, None, tuple(ends), defaults, None, read_pooling(folder))
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  the library raises plain Exception
        raise UnsupportedModel(f"{file} cannot be read: {error}") from None
    if fault := frame_fault(tokenizer):
        raise UnsupportedModel(f"{file} cannot be used: {fault}")
    names = special_names(folder, settings)
    add_listed(tokenizer, folder, settings)
    own_end = tokenizer.token_to_id(names["eos_token"]) if "eos_token" in names else None
    if own_end is not None and own_end not in ends:
        ends.append(own_end)
    how = defaults, read_pooling(folder), own
    return _codec(tokenizer, _templates(folder, settings), names, tuple(ends), *how)


def _codec(
    tokenizer: Tokenizer,
    templates: dict[str, str],
    names: dict[str, str],
    eos_ids: tuple[int, ...],
    defaults: GenerationDefaults,
    pooling: Pooling,
    own: OwnTemplates,
) -> TextCodec:
    vocabulary = tokenizer.get_vocab()
    if not vocabulary or max(vocabulary.values()) >= _MOST_IDS:
        last = max(vocabulary.values(), default=None)
        raise UnsupportedModel(
            f"the last id of the checkpoint's tokenizer is {last}; want one from 0 to {_MOST_IDS - 1}"
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    pieces = Pieces(tokenizer)
    # Elsewhere a token may stand for a word of any length that the vocabulary lacks.
    bounded = pieces.byte_level and "BPE" in type(tokenizer.model).__name__
    pair = None if own.pair is None else PairTemplate(own.pair, names)
    what = "the checkpoint's chat template"
    if own.chat is not None:
        templates, what = {"default": read_template(own.chat, "--chat-template")}, f"--chat-template: {own.chat}"
    sources = [*templates.values(), *names.values(), *(() if pair is None else (pair.source,))]
    tokens = cut_tokens(tokenizer, sources)
    return TextCodec(
        tokenizer,
        ChatTemplate(templates["default"], names, templates.get("tool_use"), what) if "default" in templates else None,
        TextParts(partial(_encode, tokenizer, add_special_tokens=False), tokens),
        frame(tokenizer),
        pieces,
        eos_ids,
        defaults,
        # Each byte is at most one character of a token's spelling; normalisation shortens a text to a third at most.
        3 * max(map(len, vocabulary)) if bounded else None,
        pooling,
        pair,
    )


def _ids(value: Any) -> list[int]:
    """`eos_token_id` is one id, a list of them, or missing."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(one, bool) or not isinstance(one, int) for one in listed):
        raise UnsupportedModel(f"the checkpoint has eos_token_id {value!r}; want an id or a list of ids")
    return list(dict.fromkeys(listed))


def _templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """By name. As in transformers, those in files count and not those in the settings; these fill in for a default.

    Models that can also see may have theirs in a file for what prepares images, too.
    """
    more = folder / "additional_chat_templates"
    files = [
        ("default", folder / "chat_template.jinja"),
        ("default", more / "default.jinja"),
        ("tool_use", more / "tool_use.jinja"),
    ]
    sources: dict[str, Any] = {name: _read_text(file) for name, file in files if file.exists()}
    if "default" not in sources:
        said = settings.get("chat_template") or read_object(folder / "chat_template.json").get("chat_template")
        named = said if isinstance(said, list) else [{"name": "default", "template": said}]
        known = [one for one in named if isinstance(one, dict) and one.get("name") in ("default", "tool_use")]
        sources = {one["name"]: one.get("template") for one in known} | sources
    for name, source in sources.items():
        if not isinstance(source, str | None):
            raise UnsupportedModel(f"{folder}: chat template {name} is a {type(source).__name__}; want text")
    return {name: source for name, source in sources.items() if source is not None}


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{file} cannot be read as text: {error}") from None
