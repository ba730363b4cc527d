"""Ways of some families to say how positions turn heads, said as others say it.

Knows what their fields mean; what is read then is known by `rope.py`.
"""

from collections.abc import Mapping
from typing import Any

from tercet.model.config_fields import number

_NAMES = "rope_parameters", "rope_scaling"
_OF_OTHER_KINDS = "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"


def with_plain_positions(config: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen's images have positions in three dimensions; in text the three are one and the same."""
    config = dict(config)
    for name in _NAMES:
        if isinstance(rope := config.get(name), Mapping) and "mrope_section" in rope:
            plain = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
            config[name] = {key: "default" if value == "mrope" else value for key, value in plain.items()}
    return config


def with_stretched_base(config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Hunyuan's files call it dynamic, but its `alpha` makes the base larger once and for all. What they say beside it
    of other kinds of scaling means nothing."""
    config = dict(config)
    for name in _NAMES:
        rope = config.get(name)
        if isinstance(rope, Mapping) and "dynamic" in (rope.get("rope_type"), rope.get("type")) and rope.get("alpha"):
            if head_dim < 4:
                raise ValueError(f"config.json: head_dim is {head_dim}; want 4 at least beside an alpha of positions")
            theta = number({"rope_theta": config.get("rope_theta", 10_000.0), **rope}, "rope_theta", 10_000.0)
            stretched = theta * number(rope, "alpha", 1.0) ** (head_dim / (head_dim - 2))
            said = ("alpha", "rope_type", "type", *_OF_OTHER_KINDS)
            config[name] = {key: value for key, value in rope.items() if key not in said} | {"rope_theta": stretched}
    return config
