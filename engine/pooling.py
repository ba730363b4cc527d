"""How a checkpoint makes one vector of a text, as sentence-transformers or llama.cpp write it down.

It reads a folder's `modules.json` and what that names, or looks up a GGUF file's setting. Of all ways one is computed
here: the hidden state of the last token. Knows no tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tercet.engine.errors import UnsupportedModel
from tercet.engine.json_file import read_json, read_object

_LAST = "lasttoken"
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": _LAST,
}
_GGUF_MODES = {1: "mean", 2: "cls", 3: _LAST, 4: "rank"}


@dataclass(frozen=True)
class Pooling:
    """Of the hidden state of a text's last token."""

    normalized: bool = True
    """Vectors are brought to length one."""
    refusal: str | None = None
    """Why the checkpoint's vectors are not made here; they are then those of another computation."""


def read_pooling(folder: Path) -> Pooling:
    """What a folder says; one that says nothing has the last token's vector, of length one."""
    try:
        modules = folder / "modules.json"
        if modules.exists():
            return _of_modules(modules)
        config = folder / "1_Pooling" / "config.json"
        if config.exists():
            _check_mode(config)
    except UnsupportedModel as error:
        return Pooling(refusal=str(error))
    return Pooling()


def pooling_of_gguf(metadata: Mapping[str, Any], file: Path) -> Pooling:
    """What a GGUF file says, likewise."""
    name = f"{metadata.get('general.architecture')}.pooling_type"
    kind = metadata.get(name, 0)
    mode = _GGUF_MODES.get(kind, str(kind)) if isinstance(kind, int) else repr(kind)
    if kind and mode != _LAST:
        return Pooling(refusal=f"{file}: {name} is {kind} ({mode}); supported: 3 ({_LAST})")
    return Pooling()


def _of_modules(file: Path) -> Pooling:
    """What they are is said by the last part of a type's name, which stays as packages are rearranged."""
    modules = read_json(file)
    listed = modules if isinstance(modules, list) else []
    kinds = [str(one.get("type")).rpartition(".")[2] for one in listed if isinstance(one, dict)]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        named = ", ".join(kinds) or "none"
        raise UnsupportedModel(
            f"{file}: modules are {named}; supported: Transformer, Pooling, and Normalize or nothing"
        )
    path = listed[1].get("path")
    folder = file.parent / str(path)
    if not folder.resolve().is_relative_to(file.parent.resolve()):
        raise UnsupportedModel(f"{file}: path of Pooling is {path!r}; want a folder beside it")
    _check_mode(folder / "config.json")
    return Pooling(normalized=len(kinds) == 3)


def _check_mode(file: Path) -> None:
    if not file.exists():
        raise UnsupportedModel(f"{file} is missing; want what modules.json names")
    config = read_object(file)
    said = config.get("pooling_mode")
    if said is None:
        modes = [mode for flag, mode in _FLAGS.items() if config.get(flag, mode == "mean")]
    else:
        modes = [str(one).lower() for one in (said if isinstance(said, list) else [said])]
    if modes != [_LAST]:
        named = " and ".join(modes) or "none"
        raise UnsupportedModel(f"{file}: the pooling mode is {named}; supported: {_LAST}")
