"""What a config.json says of layers that are not all alike: which of them attend through a window or know no positions.

Knows the families' ways to say so; knows no other field.
"""

from collections.abc import Mapping
from typing import Any

from tercet.model.config_fields import flag, positive
from tercet.model.rope import Rope

_ALL_OR_NONE = ("llama", "mistral", "phi3", "granite")
"""Families whose layers are all alike, whatever layer_types says."""


def layer_windows(config: Mapping[str, Any], family: str) -> tuple[int, ...]:
    """How many tokens back each layer sees, 0: all; ValueError where transformers would see otherwise."""
    num_layers = int(config["num_hidden_layers"])
    window = config.get("sliding_window")
    if family in ("llama", "granite") or (family not in _ALL_OR_NONE and not flag(config, "use_sliding_window")):
        window = None
    if window is not None:
        window = positive(config, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is None and family == "smollm3":
        return tuple(0 if turns or window is None else window for turns in _layers_that_turn(config))
    if kinds is None:
        first = 0 if family in _ALL_OR_NONE else _first_windowed(config)
        return tuple(window if window and layer >= first else 0 for layer in range(num_layers))
    known = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(str(kind) not in known for kind in kinds):
        raise ValueError(f"config.json: layer_types is {kinds!r}; supported: one of {', '.join(known)} for each layer")
    if family in _ALL_OR_NONE:
        # These ignore layer_types in transformers: all layers follow sliding_window.
        expected = "sliding_attention" if window else "full_attention"
        if set(kinds) != {expected}:
            raise ValueError(f"config.json: layer_types is {kinds!r}; supported for {family}: {expected} throughout")
    if "sliding_attention" in kinds and window is None:
        raise ValueError("config.json: layer_types asks for sliding_attention, but sliding_window is not in use")
    return tuple(known[kind] or 0 for kind in kinds)


def layer_ropes(config: Mapping[str, Any], family: str, rope: Rope) -> tuple[Rope | None, ...]:
    """How positions turn the heads of each layer; None: not at all."""
    if family == "smollm3":
        return tuple(rope if turns else None for turns in _layers_that_turn(config))
    return (rope,) * int(config["num_hidden_layers"])


def _layers_that_turn(config: Mapping[str, Any]) -> list[bool]:
    num_layers = int(config["num_hidden_layers"])
    given = config.get("no_rope_layers")
    if given is None:
        interval = positive(config, "no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(given, list) or len(given) < num_layers or any(turns not in (0, 1) for turns in given):
        raise ValueError(f"config.json: no_rope_layers is {given!r}; want 0 or 1 for each of {num_layers} layers")
    return [bool(turns) for turns in given[:num_layers]]


def _first_windowed(config: Mapping[str, Any]) -> int:
    first = config.get("max_window_layers", 0)
    if isinstance(first, bool) or not isinstance(first, int):
        raise ValueError(f"config.json: max_window_layers is {first!r}; want a whole number")
    return first
