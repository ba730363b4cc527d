"""How positions turn heads, as a GGUF file's metadata and its tensors of factors say it.

What is not there is as in llama.cpp; only a factor of 0, which counts as none there, is refused.
"""

import math
from collections.abc import Mapping

from tercet.model.gguf_settings import Settings
from tercet.model.rope import Rope

FACTORS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
Factors = Mapping[str, tuple[float, ...]]
"""Those of the three tensors that the file has."""


def gguf_rope(take: Settings, factors: Factors, context_length: int, turned: float) -> Rope:
    """Of layers that have no settings of their own. `turned`: how much of each head turns."""
    theta = take.number("rope.freq_base", 10_000.0, above=1)
    factor = take.number("rope.scaling.factor", 1.0)
    kind = take.text("rope.scaling.type", "none" if factor == 1 else "linear")
    original = int(take.number("rope.scaling.original_context_length", context_length, above=1))
    if factors:
        _check(take.source, factors, kind, factor)
    if LONG in factors:
        return Rope(
            theta,
            "longrope",
            factor=context_length / original,
            original_length=original,
            attention_factor=take.number("rope.scaling.attn_factor", 1.0),
            factors=factors[SHORT],
            long_factors=factors[LONG],
            turned=turned,
        )
    if FACTORS in factors:
        return Rope(theta, "factors", factors=factors[FACTORS], turned=turned)
    match kind:
        case "none":
            return Rope(theta, turned=turned)
        case "linear":
            return Rope(theta, "linear", factor=factor, turned=turned)
        case "yarn":
            attention_factor = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
            return Rope(theta, "yarn", factor, original, attention_factor=attention_factor, turned=turned)
    raise ValueError(f"{take.source}: rope.scaling.type is {kind!r}; supported: none, linear, yarn")


def turned_part(dimensions: int, head_dim: int) -> float:
    """So that a Rope turns this many numbers of a head."""
    part = dimensions / head_dim
    return part if int(head_dim * part) == dimensions else math.nextafter(part, 1.0)


def _check(source: str, factors: Factors, kind: str, factor: float) -> None:
    if set(factors) not in ({FACTORS}, {SHORT, LONG}):
        raise ValueError(f"{source} has {', '.join(sorted(factors))}; want {FACTORS} alone, or {SHORT} and {LONG}")
    for name, values in factors.items():
        if kind != "none" and not (kind == "longrope" and name != FACTORS and factor == 1):
            raise ValueError(f"{source}: {name} beside rope.scaling.type {kind!r}; supported: one of the two")
        if not min(values) > 0:
            raise ValueError(f"{source}: {name} has {min(values)}; want numbers over 0")
