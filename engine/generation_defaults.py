"""What a checkpoint wants where a request says nothing: generation_config.json's, or those of a GGUF file.

It knows shapes; whether a temperature makes sense is decided in `request_check.py`.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tercet.engine.errors import UnsupportedModel

_UNUSED = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "num_beams",
    "sequence_bias",
    "suppress_tokens",
    "typical_p",
)
"""Of generation_config.json: transformers would write other tokens with them."""
_FLAG = "--override-generation-config"
_GGUF = "general.sampling."
_GGUF_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_UNUSED_GGUF = ("mirostat", "penalty_last_n", "sequence", "xtc_probability")
"""With them llama.cpp would."""


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a request gets that does not say otherwise. None: the neutral value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_new_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_strings: str | tuple[str, ...] | None = None


def defaults_of_config(config: Mapping[str, Any], file: str) -> GenerationDefaults:
    """What is in a generation_config.json, `file`."""
    _warn("generation_config.json", [name for name in _UNUSED if config.get(name) not in (None, 0, 1, [], {})])
    return _read(config, file)


def defaults_of_gguf(metadata: Mapping[str, Any], file: str) -> GenerationDefaults:
    """What llama.cpp goes by, too."""
    said = {name.removeprefix(_GGUF): value for name, value in metadata.items() if name.startswith(_GGUF)}
    _warn("general.sampling", [name for name in _UNUSED_GGUF if said.get(name) not in (None, 0, -1, "")])
    return _read({ours: said.get(theirs) for theirs, ours in _GGUF_NAMES.items()}, f"{file}: general.sampling")


def own_defaults(given: object) -> GenerationDefaults | None:
    """From what a flag or a program says: such defaults, or a map of some. ValueError names what is wrong."""
    if given is None or isinstance(given, GenerationDefaults):
        return given
    known = GenerationDefaults.__struct_fields__
    try:
        if unknown := [name for name in msgspec.convert(given, dict[str, Any]) if name not in known]:
            raise ValueError(f"{_FLAG} got {', '.join(map(repr, unknown))}; want some of {', '.join(known)}")
        return msgspec.convert(given, GenerationDefaults)
    except msgspec.ValidationError as error:
        raise ValueError(f"{_FLAG} got {given!r}: {error}; want such as {{'temperature': 0.6}}") from None


def in_place(own: GenerationDefaults | None, of: GenerationDefaults) -> GenerationDefaults:
    """These, but those that `own` has."""
    said = {} if own is None else msgspec.structs.asdict(own)
    return msgspec.structs.replace(of, **{name: value for name, value in said.items() if value is not None})


def _read(said: Mapping[str, Any], where: str) -> GenerationDefaults:
    try:
        return msgspec.convert(said, GenerationDefaults)
    except msgspec.ValidationError as error:
        raise UnsupportedModel(f"{where}: {error}") from None


def _warn(where: str, unused: Sequence[str]) -> None:
    if unused:
        print(f"warning: {where}: not used: {', '.join(unused)}", file=sys.stderr)
