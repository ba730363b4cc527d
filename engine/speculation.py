"""Whether an engine tries tokens ahead of those that are sampled, and how many: names as vLLM has them.

Knows settings only; when it pays is `guessing.py`'s matter.
"""

from typing import Literal

import msgspec

_MOST_TOKENS, _MOST_REPEATED = 15, 8
_FLAG = "--speculative-config"


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What follows where a request's last few tokens have been before is tried: prompt lookup."""

    method: Literal["ngram"] = "ngram"
    num_speculative_tokens: int
    """Tried behind the last one, in a step."""
    prompt_lookup_max: int = 4
    """Of a request's last tokens so many are looked for."""
    prompt_lookup_min: int = 1
    """Fewer of them are not enough. A step that tries takes as long whether or not it has something to try."""
    disable_by_batch_size: int = 16
    """With more requests in a step nothing is tried: their tokens fill it."""

    def __post_init__(self) -> None:
        _check("num_speculative_tokens", self.num_speculative_tokens, 1, _MOST_TOKENS)
        _check("prompt_lookup_max", self.prompt_lookup_max, 1, _MOST_REPEATED)
        _check("prompt_lookup_min", self.prompt_lookup_min, 1, self.prompt_lookup_max)
        _check("disable_by_batch_size", self.disable_by_batch_size, 1, 64)


def speculative_config(given: object) -> SpeculativeConfig | None:
    """From what a flag or a program says: such a config, or a map of its fields. ValueError names what is wrong."""
    if given is None or isinstance(given, SpeculativeConfig):
        return given
    try:
        return msgspec.convert(given, SpeculativeConfig)
    except msgspec.ValidationError as error:
        example = '{"method": "ngram", "num_speculative_tokens": 7}'
        raise ValueError(f"{_FLAG} got {given!r}: {error}; want such as {example}") from None


def _check(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; want {low} to {high}")
