"""Rotary position embedding: the scaling schemes, and the table of cosines and sines they come down to.

Knows the schemes' formulas; knows neither layers nor how a table is applied (`triton_kernels/rotary.py`).

Shape suffixes: P positions, R rotary dimension, F frequencies (R / 2).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

_RANGE = 1e-15, 1e15
"""Of a scheme's numbers: far more than there are, and products of some stay finite."""
KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
PROPORTIONAL = "proportional"


@dataclass(frozen=True)
class Rope:
    """How positions become angles. `kind` "factors" (GGUF) divides each frequency by its own number, "longrope" too."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0
    """Length the model was trained for before scaling (yarn, llama3, longrope); dynamic: where scaling would begin."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Of cosines and sines."""
    score_factor: float = 1.0
    """Of scores, what does not turn included: where attention reads latents (yarn)."""
    query_growth: float = 0.0
    """How fast queries grow with the logarithm of how often `original_length` fits ahead of them (yarn)."""
    truncate: bool = True
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    """Instead of `factors` where sequences may be longer than `original_length` (longrope)."""
    turned: float = 1.0
    """How much of each head turns."""

    def rotary_dim(self, head_dim: int) -> int:
        """How many numbers of a head are turned, the first ones. Proportional: all, and most of them by nothing."""
        return head_dim if self.kind == PROPORTIONAL else int(head_dim * self.turned)

    def max_length(self, max_position_embeddings: int) -> int:
        """The longest sequence this scaling was made for."""
        match self.kind:
            case "linear":
                return int(max_position_embeddings * self.factor)
            case "yarn":
                return max(max_position_embeddings, int(self.original_length * self.factor))
        return max_position_embeddings


def parse_rope(
    config: Mapping[str, Any], *, partial: bool = False, grows: bool = False, proportional: bool = False
) -> Rope:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before); refuse what is unknown.

    `partial`: the family knows heads of which only a part turns; `grows`: it knows queries that grow, and wants to be
    told how fast; `proportional`: of some whole heads, by angles of which only the first are not nothing.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"config.json: rope_parameters is {given!r}; want an object")
    nested = [key for key, value in given.items() if isinstance(value, Mapping)]
    if nested:
        raise ValueError(
            f"config.json: rope_parameters differ by layer type ({', '.join(nested)}); supported: one set for all"
        )
    params = {key: value for key, value in given.items() if value is not None}
    kind = params.pop("rope_type", params.pop("type", "default"))
    params.pop("type", None)
    if kind in ("su", "yarn") and "short_factor" in params:
        kind = "longrope"  # as early files call it
    kinds = (*KINDS, PROPORTIONAL) if proportional else KINDS
    if kind not in kinds:
        raise ValueError(f"config.json: rope_type is {kind!r}; supported: {', '.join(kinds)}")
    params = {"partial_rotary_factor": config.get("partial_rotary_factor", 1.0), **params}
    if not partial and kind != PROPORTIONAL and params["partial_rotary_factor"] != 1:
        raise ValueError(f"config.json: partial_rotary_factor is {params['partial_rotary_factor']!r}; supported: 1.0")
    turned = _number(params, "partial_rotary_factor")
    if turned > 1:
        raise ValueError(f"config.json: partial_rotary_factor is {turned}; want 1.0 at most")
    theta = _number(params, "rope_theta", config.get("rope_theta", 10_000.0), above=1)
    max_positions = int(config["max_position_embeddings"])
    if grows and kind != "yarn":
        raise ValueError(f"config.json: rope_type is {kind!r}, but queries grow; supported then: yarn")
    if grows and params.pop("max_position_embeddings", max_positions) != max_positions:
        raise ValueError(f"config.json: rope_parameters have another max_position_embeddings; want {max_positions}")
    if "original_max_position_embeddings" in config:  # beside the rope settings, as some checkpoints have it, it wins
        params["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    original = int(_number(params, "original_max_position_embeddings", max_positions, above=1))
    rope = Rope(theta=theta)
    match kind:
        case "linear":
            rope = Rope(theta, kind, factor=_number(params, "factor"))
        case "proportional":
            rope = Rope(theta, kind, factor=_number(params, "factor", 1.0))
        case "dynamic":
            rope = Rope(theta, kind, factor=_number(params, "factor"), original_length=max_positions)
        case "llama3":
            rope = Rope(
                theta,
                kind,
                factor=_number(params, "factor"),
                original_length=original,
                low_freq_factor=_number(params, "low_freq_factor"),
                high_freq_factor=_number(params, "high_freq_factor"),
            )
        case "yarn":
            factor = _number(params, "factor", max_positions / original)
            truncate = params.pop("truncate", True)
            if not isinstance(truncate, bool):
                raise ValueError(f"config.json: rope parameter truncate is {truncate!r}; want true or false")
            attention_factor, score_factor = _yarn_attention_factors(params, factor)
            rope = Rope(
                theta,
                kind,
                factor=factor,
                original_length=original,
                beta_fast=_number(params, "beta_fast", 32.0, or_zero=True) or 32.0,
                beta_slow=_number(params, "beta_slow", 1.0, or_zero=True) or 1.0,
                attention_factor=attention_factor,
                score_factor=score_factor,
                query_growth=_number(params, "llama_4_scaling_beta", or_zero=True) if grows else 0.0,
                truncate=truncate,
            )
        case "longrope":
            factor = _number(params, "factor", max_positions / original)
            stretched = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            rope = Rope(
                theta,
                kind,
                factor=factor,
                original_length=original,
                attention_factor=_number(params, "attention_factor", stretched),
                factors=_numbers(params, "short_factor"),
                long_factors=_numbers(params, "long_factor"),
            )
    if params:
        raise ValueError(
            f"config.json: rope_parameters of type {kind!r} hold {sorted(params)}, which this type does not know"
        )
    return replace(rope, turned=turned)


def rotary_tables(
    turns: Iterable[tuple[Rope | None, int]], rotary_dim: int, num_positions: int, device: torch.device
) -> dict[tuple[Rope | None, int], Tensor]:
    """Of each way to turn heads of a size. None: then `rotary_dim` numbers stay as they are."""
    return {
        (rope, head_dim): still_table(rotary_dim, num_positions, device)
        if rope is None
        else rotary_table(rope, head_dim, num_positions, device)
        for rope, head_dim in set(turns)
    }


def rotary_table(rope: Rope, head_dim: int, num_positions: int, device: torch.device) -> Tensor:
    """fp32 [num_positions, R]: cosines of all frequencies, then sines, the scheme's attention factor inside.

    Of a longrope's two lists of factors one serves all positions, by how many there are: keys that are in the cache
    stay as they were turned, and so a sequence cannot change from one list to the other where it gets long.
    """
    if rope.kind == "longrope" and num_positions > rope.original_length:
        rope = replace(rope, factors=rope.long_factors)
    inv_freq_F = _inverse_frequencies(rope, rope.rotary_dim(head_dim)).to(device)
    angles_PF = torch.arange(num_positions, dtype=torch.float32, device=device)[:, None] * inv_freq_F
    return torch.cat((angles_PF.cos(), angles_PF.sin()), dim=1) * rope.attention_factor


def query_scales(rope: Rope | None, num_positions: int, device: torch.device) -> Tensor | None:
    """fp32 [num_positions]: what queries are multiplied by; None: all by one, up to the length of training at least."""
    if rope is None or not rope.query_growth or num_positions <= rope.original_length:
        return None
    # On the CPU whatever the device, as angles are.
    times_P = (torch.arange(num_positions) // rope.original_length).float()
    return (1 + rope.query_growth * torch.log(1 + times_P)).to(device)


def still_table(dim: int, num_positions: int, device: torch.device) -> Tensor:
    """By which nothing turns, to the bit: for layers without positions, which so need no kernels of their own."""
    angles_PF = torch.zeros(num_positions, dim // 2, dtype=torch.float32, device=device)
    return torch.cat((angles_PF.cos(), angles_PF.sin()), dim=1)


def _inverse_frequencies(rope: Rope, dim: int) -> Tensor:
    # On the CPU and in fp32 whatever the device, so that every rank and every device turns by the same angles.
    exponent_F = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    inv_freq_F = 1.0 / (rope.theta**exponent_F)
    match rope.kind:
        case "linear":
            return inv_freq_F / rope.factor
        case "llama3":
            return _llama3(rope, inv_freq_F)
        case "yarn":
            return _yarn(rope, dim, exponent_F)
        case "factors":
            if len(rope.factors) != dim // 2:
                raise ValueError(f"rope_freqs has {len(rope.factors)} factors; want {dim // 2}")
            return inv_freq_F / torch.tensor(rope.factors, dtype=torch.float32)
        case "proportional":
            inv_freq_F[int(rope.turned * dim // 2) :] = 0
            return inv_freq_F / rope.factor
        case "longrope":
            return 1.0 / (torch.tensor(rope.factors, dtype=torch.float32) * rope.theta**exponent_F)
    return inv_freq_F  # also "dynamic": within the original length it changes nothing, and longer is refused


def _llama3(rope: Rope, inv_freq_F: Tensor) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between blended."""
    wavelength_F = 2 * math.pi / inv_freq_F
    blend_F = (rope.original_length / wavelength_F - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended_F = (1 - blend_F) * inv_freq_F / rope.factor + blend_F * inv_freq_F
    is_long_F = wavelength_F > rope.original_length / rope.low_freq_factor
    is_short_F = wavelength_F < rope.original_length / rope.high_freq_factor
    return torch.where(is_long_F, inv_freq_F / rope.factor, torch.where(is_short_F, inv_freq_F, blended_F))


def _yarn(rope: Rope, dim: int, exponent_F: Tensor) -> Tensor:
    """Dimensions that turn often within the original length are kept, those that turn seldom are stretched."""

    def dimension_of(rotations: float) -> float:
        return (dim * math.log(rope.original_length / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    keep_F = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequency_F = rope.theta**exponent_F
    return (1.0 / (rope.factor * frequency_F)) * (1 - keep_F) + (1.0 / frequency_F) * keep_F


def _yarn_attention_factors(params: dict[str, Any], factor: float) -> tuple[float, float]:
    """Of cosines and sines, and of scores."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale = _number(params, "mscale", 0.0, or_zero=True)
    mscale_all_dim = _number(params, "mscale_all_dim", 0.0, or_zero=True)
    of_scores = scale(mscale_all_dim) ** 2
    if "attention_factor" in params:
        return _number(params, "attention_factor", or_zero=True), of_scores
    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim), of_scores
    return scale(1.0), of_scores


def _number(
    params: dict[str, Any], name: str, default: float | None = None, *, above: float = 0, or_zero: bool = False
) -> float:
    value = params.pop(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    least, most = max(above, _RANGE[0]), _RANGE[1]
    if not is_number or not (least < value < most or (or_zero and value == 0)):
        wanted = f"{'0 or ' if or_zero else ''}a number over {above} and below {most:g}"
        raise ValueError(f"config.json: rope parameter {name} is {value!r}; want {wanted}")
    return float(value)


def _numbers(params: dict[str, Any], name: str) -> tuple[float, ...]:
    values = params.pop(name, None)
    if not isinstance(values, list) or not all(isinstance(v, int | float) and 0 < v < math.inf for v in values):
        raise ValueError(f"config.json: rope parameter {name} is {values!r}; want a list of numbers over 0")
    return tuple(float(value) for value in values)
