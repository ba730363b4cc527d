"""Tokens that a checkpoint lists beside its tokenizer.json, and which of them are special, as transformers has them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tercet.engine.errors import UnsupportedModel
from tercet.engine.json_file import read_object

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def special_names(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Special tokens by what templates call them. `settings`: what tokenizer_config.json says."""
    settings = _with_map(folder, settings)
    own = {name: token for name, token in settings.items() if name.endswith("_token") and isinstance(token, str)}
    if isinstance(more := settings.get("extra_special_tokens"), dict):
        own |= more
    named = {**own, **{name: settings.get(name) for name in _NAMES}}
    contents = {name: _content(token) for name, token in named.items()}
    return {name: content for name, content in contents.items() if content is not None}


def add_listed(tokenizer: Tokenizer, folder: Path, settings: dict[str, Any]) -> None:
    """Add what tokenizer.json lacks or has with other settings, such as to take the spaces around a token; and mark
    what is special, even where tokenizer.json has it as an ordinary token."""
    special = list(special_names(folder, settings).values())
    settings = _with_map(folder, settings)
    more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    contents = map(_content, more if isinstance(more, list) else [])
    special += [content for content in contents if content is not None]
    known = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    for token_id, token in sorted(_listed(tokenizer, folder, settings, special).items()):
        if repr(token) not in known:
            is_new = tokenizer.token_to_id(token.content) is None
            tokenizer.add_tokens([token])
            if is_new and (got := tokenizer.token_to_id(token.content)) != token_id:
                said = f"{folder} lists {token.content!r} as token {token_id}, which tokenizer.json does not have"
                raise UnsupportedModel(f"{said}; want {got}, the next there")
    _mark(tokenizer, special)


def _with_map(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The older special_tokens_map.json has the last word, unless the settings list added tokens."""
    return (
        settings if "added_tokens_decoder" in settings else settings | read_object(folder / "special_tokens_map.json")
    )


def _listed(
    tokenizer: Tokenizer, folder: Path, settings: dict[str, Any], special: Iterable[str]
) -> dict[int, AddedToken]:
    """By id."""
    file, listed = folder / "tokenizer_config.json", settings.get("added_tokens_decoder")
    try:
        if listed is not None:
            return {int(token_id): AddedToken(**token) for token_id, token in listed.items()}
        file, known = folder / "added_tokens.json", tokenizer.get_added_tokens_decoder()
        # The form before: of those that tokenizer.json has, it knows more.
        return {
            token_id: AddedToken(content, special=content in special, normalized=content not in special)
            for content, token_id in read_object(file).items()
            if token_id not in known
        }
    except (TypeError, ValueError, AttributeError) as error:
        raise UnsupportedModel(f"{file} has added tokens that cannot be read: {error}") from None


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _mark(tokenizer: Tokenizer, names: list[str]) -> None:
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    unmarked = [
        name for name in dict.fromkeys(names) if name not in special and tokenizer.token_to_id(name) is not None
    ]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in unmarked])
