"""Whether an engine tries tokens ahead of those that are sampled, and how many: names as vLLM has them.

Knows settings only; when it pays is `guessing.py`'s matter.
"""

from typing import Literal

import msgspec

_MOST_TOKENS, _MOST_REPEATED = 15, 8
_REPEATED = 4
_FLAG = "--speculative-config"
_ALSO_MTP = tuple(f"{family}_mtp" for family in ("deepseek", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5"))
"""What models' own pages call it, in words of other engines."""


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`ngram`: what follows where a request's last few tokens have been before is tried (prompt lookup); `mtp`: what
    the model's own layer behind its last one guesses, which some models come with (multi-token prediction); `eagle3`:
    what a layer from another checkpoint guesses, which was trained for the model."""

    method: Literal["ngram", "mtp", "eagle3"] = "ngram"
    model: str | None = None
    """That other checkpoint: a folder or a name on the hub."""
    num_speculative_tokens: int
    """Tried behind the last one, in a step."""
    prompt_lookup_max: int | None = None
    """Of a request's last tokens so many are looked for; None: as many as pays, or where a layer guesses none."""
    prompt_lookup_min: int | None = None
    """Fewer of them are not enough. A step that tries takes as long whether or not it has something to try."""
    disable_by_batch_size: int = 16
    """With more requests in a step nothing is tried: their tokens fill it."""

    def __post_init__(self) -> None:
        _check("num_speculative_tokens", self.num_speculative_tokens, 1, _MOST_TOKENS)
        if (looked_up := self.looked_up) is not None:
            _check("prompt_lookup_max", looked_up[1], 1, _MOST_REPEATED)
            _check("prompt_lookup_min", looked_up[0], 1, looked_up[1])
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            if looked_up is None and getattr(self, name) is not None:
                raise ValueError(f"{name} came with method {self.method}, which looks nothing up; want method ngram")
        if (self.method == "eagle3") != bool(self.model):
            wanted = "want the folder or name of a checkpoint" if self.method == "eagle3" else "want method eagle3"
            raise ValueError(f"model is {self.model!r} for method {self.method}; {wanted}")
        _check("disable_by_batch_size", self.disable_by_batch_size, 1, 64)

    @property
    def looked_up(self) -> tuple[int, int] | None:
        """How many of a request's last tokens are looked for, at least and at most."""
        if self.method != "ngram":
            return None
        longest = _REPEATED if self.prompt_lookup_max is None else self.prompt_lookup_max
        return 1 if self.prompt_lookup_min is None else self.prompt_lookup_min, longest


def speculative_config(given: object) -> SpeculativeConfig | None:
    """From what a flag or a program says: such a config, or a map of its fields. ValueError names what is wrong."""
    if given is None or isinstance(given, SpeculativeConfig):
        return given
    if isinstance(given, dict) and given.get("method") in _ALSO_MTP:
        given = {**given, "method": "mtp"}
    try:
        return msgspec.convert(given, SpeculativeConfig)
    except msgspec.ValidationError as error:
        example = '{"method": "ngram", "num_speculative_tokens": 7}'
        raise ValueError(f"{_FLAG} got {given!r}: {error}; want such as {example}") from None


def _check(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; want {low} to {high}")
