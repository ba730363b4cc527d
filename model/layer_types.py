"""What a config.json says of layers that are not all alike: windows of attention, and how positions turn heads.

Knows the families' ways to say so, and what transformers makes of silence; knows no other field.
"""

from collections.abc import Mapping
from typing import Any

from tercet.model.config_delta import DELTA_DEFAULTS
from tercet.model.config_fields import flag, positive
from tercet.model.config_gemma4 import GEMMA4
from tercet.model.config_latents import LATENT_DEFAULTS, size_of_head
from tercet.model.config_mamba import MAMBA_DEFAULTS, turns
from tercet.model.config_positions import with_plain_positions, with_stretched_base, without_turned_share
from tercet.model.rope import Rope, parse_rope

FULL, SLIDING = "full_attention", "sliding_attention"
_UNWINDOWED = (
    *("llama", "apertus", "arcee", "granite", "olmo2", "seed_oss", "olmoe", "glm", "glm4", "glm4_moe", "minimax_m2"),
    *("ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe"),
    *LATENT_DEFAULTS,
    *DELTA_DEFAULTS,
    *MAMBA_DEFAULTS,
)
_ALIKE = (*_UNWINDOWED, "mistral", "ministral3", "mixtral", "phi3", "qwen3_moe")
"""Families whose layers are all alike, whatever layer_types says; those whose attention sees all among them."""
_PARTIAL = ("phi3", "glm", "glm4", "glm4_moe", "minimax_m2", *DELTA_DEFAULTS)
"""Families of whose heads only a part may turn."""
_GROWING = ("ministral3", "mistral4")
"""Families whose queries grow with their position."""


def layer_windows(config: Mapping[str, Any], family: str) -> tuple[int, ...]:
    """How many tokens back each layer sees, 0: all; ValueError where transformers would see otherwise."""
    window = _window(config, family)
    types = _types(config, family)
    if family in _ALIKE:
        expected = _silent_types(config, family)
        if types != expected:
            wanted = ", ".join(set(expected))
            raise ValueError(f"config.json: layer_types is {types!r}; supported for {family}: {wanted} throughout")
    if family == GEMMA4 and types[-1] != FULL:
        raise ValueError(f"config.json: layer_types ends with {types[-1]!r}; supported for {family}: {FULL}")
    if SLIDING in types and window is None:
        raise ValueError("config.json: layer_types asks for sliding_attention, but sliding_window is not in use")
    return tuple(window if kind == SLIDING and window else 0 for kind in types)


def layer_ropes(config: Mapping[str, Any], family: str, ropes: Mapping[str, Rope]) -> tuple[Rope | None, ...]:
    """How positions turn the heads of each layer; None: not at all."""
    if family == "smollm3":
        return tuple(ropes[FULL] if turns else None for turns in _layers_that_turn(config))
    types = _types(config, family)
    if not turns(config, family):
        return (None,) * len(types)
    if family == "exaone4" and SLIDING in types:
        return tuple(ropes[kind] if kind == SLIDING else None for kind in types)
    return tuple(ropes[kind] for kind in types)


def ropes_by_type(config: Mapping[str, Any], family: str) -> dict[str, Rope]:
    """How positions turn heads of layers of each type."""
    if family not in ("gemma3_text", GEMMA4, "olmo3"):
        if family in DELTA_DEFAULTS:
            config = with_plain_positions(config)
        if family == "mistral4":
            config = without_turned_share(config)
        if family in ("hunyuan_v1_dense", "hunyuan_v1_moe"):
            config = with_stretched_base(config, size_of_head(config))
        rope = parse_rope(_turned(config), partial=family in _PARTIAL, grows=family in _GROWING)
        return dict.fromkeys((FULL, SLIDING), rope)
    both = config.get("rope_parameters")
    if both is None:
        # As files had it before transformers 5: what is scaled is that of layers that see all.
        return {FULL: parse_rope(config), SLIDING: parse_rope({**_unscaled(config), **_local_base(config)})}
    if not isinstance(both, Mapping) or set(both) != {FULL, SLIDING} or "rope_scaling" in config:
        raise ValueError(
            f"config.json: rope_parameters is {both!r}; want {FULL} and {SLIDING}, and no rope_scaling beside them"
        )
    config = _unscaled(config)
    return {
        FULL: parse_rope({**config, "rope_parameters": both[FULL]}, proportional=family == GEMMA4),
        SLIDING: parse_rope({**config, **_local_base(config), "rope_parameters": both[SLIDING]}),
    }


def _turned(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """How many numbers of a head turn, as a part of them where a number is given."""
    if config.get("rotary_dim") is None:
        return config
    return {"partial_rotary_factor": positive(config, "rotary_dim") / positive(config, "head_dim"), **config}


def _unscaled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without what counts for layers of all types alone."""
    scaling = ("rope_scaling", "rope_parameters", "original_max_position_embeddings")
    return {name: value for name, value in config.items() if name not in scaling}


def _local_base(config: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma's is another one."""
    return {"rope_theta": config["rope_local_base_freq"]} if "rope_local_base_freq" in config else {}


def _window(config: Mapping[str, Any], family: str) -> int | None:
    """Of layers that have one."""
    match family:
        case _ if family in _UNWINDOWED:
            return None
        case "qwen2" | "qwen2_moe" | "qwen3" | "qwen3_moe" | "smollm3" if not flag(config, "use_sliding_window"):
            return None
    return None if config.get("sliding_window") is None else positive(config, "sliding_window")


def _types(config: Mapping[str, Any], family: str) -> list[str]:
    # Layers that carry a state have their own place in a ModelConfig.
    types = None if family in (*DELTA_DEFAULTS, *MAMBA_DEFAULTS) else config.get("layer_types")
    kinds = config.get("attn_type_list")  # MiniMax's
    if kinds is not None and (not isinstance(kinds, list) or any(kind != 1 for kind in kinds)):
        raise ValueError(f"config.json: attn_type_list is {kinds!r}; supported: 1 for each layer")
    if types is None:
        return _silent_types(config, family)
    known = (FULL, SLIDING)
    if (
        not isinstance(types, list)
        or len(types) != config["num_hidden_layers"]
        or any(kind not in known for kind in types)
    ):
        raise ValueError(f"config.json: layer_types is {types!r}; supported: one of {', '.join(known)} for each layer")
    return types


def _silent_types(config: Mapping[str, Any], family: str) -> list[str]:
    """Where layer_types says nothing."""
    layers = range(config["num_hidden_layers"])
    match family:
        case "gemma2" | "gpt_oss":
            slides = [layer % 2 == 0 for layer in layers]
        case "gemma4_text":
            slides = [(layer + 1) % 6 != 0 and layer + 1 < len(layers) for layer in layers]
        case "gemma3_text":
            pattern = positive(config, "sliding_window_pattern")
            slides = [(layer + 1) % pattern != 0 for layer in layers]
        case "olmo3":
            slides = [(layer + 1) % 4 != 0 for layer in layers]
        case _ if _window(config, family) is None:
            slides = [False for _ in layers]
        case "exaone4":
            pattern = positive(config, "sliding_window_pattern")
            slides = [(layer + 1) % pattern != 0 for layer in layers]
        case "smollm3":
            slides = [not turns for turns in _layers_that_turn(config)]
        case "qwen2_moe":
            slides = [layer % 2 == 0 and layer < _first_windowed(config) for layer in layers]
        case "qwen2" | "qwen3" | "dots1":
            slides = [layer >= _first_windowed(config) for layer in layers]
        case _:
            slides = [True for _ in layers]
    return [SLIDING if slide else FULL for slide in slides]


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
