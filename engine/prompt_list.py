"""What callers of the offline API name prompts: one or many, of many types. It knows no engine."""

from collections.abc import Mapping, Sequence
from typing import Any

from tercet.ipc.prompt import PicturePrompt

Prompt = str | Sequence[int] | PicturePrompt


def as_prompts(prompts: Any) -> Sequence[Prompt]:
    """One prompt is a list of one. Token ids may be arrays: numpy's, torch's, Python's."""
    prompts = _listed(prompts)
    if isinstance(prompts, str) or _has_text(prompts):
        return [prompts]
    if _is_sequence(prompts):
        if prompts and isinstance(prompts[0], int):
            return [prompts]
        each = [_listed(one) for one in prompts]
        if each and isinstance(each[0], int):  # numpy's own
            return [each]
        if all(map(_is_prompt, each)):
            return each
    raise TypeError(f"got prompts of type {type(prompts).__name__}; want a text, token ids, or a list of either")


def without_pictures(prompts: Any) -> Sequence[str | Sequence[int]]:
    """The same, for what takes no images."""
    many = as_prompts(prompts)
    plain = [one for one in many if not isinstance(one, Mapping)]
    if len(plain) < len(many):
        raise TypeError("got a prompt with images; want texts or token ids here")
    return plain


def _is_prompt(value: object) -> bool:
    return _is_sequence(value) or _has_text(value)


def _has_text(value: object) -> bool:
    """Whether images are beside it is the client's matter."""
    return isinstance(value, Mapping) and isinstance(value.get("prompt"), str)


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, bytes | bytearray)
