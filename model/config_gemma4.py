"""What a config.json of Gemma 4 says of layers that are not all alike: how many heads of keys and values each has, of
which size, and whose; and what they are told beside the stream.

Knows the fields that no other family has, and what transformers assumes of those; knows no window, and no position.
"""

from collections.abc import Mapping
from typing import Any

from tercet.model.blocks import Heads, LayerInputs
from tercet.model.config_fields import flag, positive

GEMMA4 = "gemma4_text"
GEMMA4_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 131072,
    "vocab_size": 262144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
"""Where config.json is silent."""
_OF_HEADS = ("num_key_value_heads", "head_dim")


def layer_heads(config: Mapping[str, Any], family: str, windows: tuple[int, ...]) -> tuple[Heads, ...]:
    """The keys and values of each layer, where the family has some of several kinds. `windows`: of layers."""
    if family != GEMMA4:
        return ()
    twice = flag(config, "attention_k_eq_v")
    first = _first_borrower(config, windows)
    usual = {name: positive(config, name) for name in _OF_HEADS}
    found = []
    for layer, window in enumerate(windows):
        own = {**usual, **_own_sizes(config, layer, is_global=not window)}
        found.append(Heads(own["num_key_value_heads"], own["head_dim"], twice and not window, layer >= first))
    return tuple(found)


def layer_inputs(config: Mapping[str, Any], family: str) -> LayerInputs | None:
    """What each layer is told of a token beside the stream, if anything."""
    if family != GEMMA4 or config["hidden_size_per_layer_input"] == 0:
        return None
    vocab_size, known = positive(config, "vocab_size"), positive(config, "vocab_size_per_layer_input")
    if known != vocab_size:
        raise ValueError(f"config.json: vocab_size_per_layer_input is {known}; supported: vocab_size ({vocab_size})")
    padding = config.get("pad_token_id") or 0
    if not isinstance(padding, int) or not 0 <= padding < vocab_size:
        raise ValueError(f"config.json: pad_token_id is {padding!r}; want a number from 0 to {vocab_size - 1}")
    return LayerInputs(positive(config, "hidden_size_per_layer_input"), config["num_hidden_layers"], padding)


def _first_borrower(config: Mapping[str, Any], windows: tuple[int, ...]) -> int:
    """From which layer on keys and values are those of layers ahead."""
    count = config.get("num_kv_shared_layers", 0)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"config.json: num_kv_shared_layers is {count!r}; want a whole number")
    first = len(windows) - count
    if count and not (first > 0 and set(windows[first:]) <= set(windows[:first])):
        wanted = "fewer than there are layers, ahead of which there is one of each of their types"
        raise ValueError(f"config.json: num_kv_shared_layers is {count}; want {wanted}")
    return first


def _own_sizes(config: Mapping[str, Any], layer: int, *, is_global: bool) -> dict[str, int]:
    """What a layer has otherwise: newer files name each layer that has, and older ones all that see everything."""
    if "per_layer_config" not in config:
        if not is_global:
            return {}
        sizes = {"head_dim": positive(config, "global_head_dim")}
        if flag(config, "attention_k_eq_v") and "num_global_key_value_heads" in config:
            sizes["num_key_value_heads"] = positive(config, "num_global_key_value_heads")
        return sizes
    given = config["per_layer_config"]
    if not isinstance(given, Mapping) or any(not str(key).isdigit() for key in given):
        raise ValueError(f"config.json: per_layer_config is {given!r}; want an object with numbers of layers")
    own = given.get(str(layer), {})
    if not isinstance(own, Mapping) or not set(own) <= set(_OF_HEADS):
        wanted = " and ".join(_OF_HEADS)
        raise ValueError(f"config.json: per_layer_config of layer {layer} is {own!r}; supported: {wanted}")
    return {name: positive(own, name) for name in own}
