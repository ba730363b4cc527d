"""What fields of a vision_config mean in all families, and how one that is wrong is refused."""

from collections.abc import Mapping
from typing import Any

from tercet.model.config_fields import number, positive

ACTIVATIONS = {"gelu_pytorch_tanh": "tanh", "gelu": "exact", "quick_gelu": "quick"}
"""Of MLPs without gates, as `triton_kernels/gelu.py` calls them."""
_MOST_OF_HEAD = 128


def vision_fields(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What the whole config.json says of its encoder; where it is silent, `defaults`."""
    given = raw.get("vision_config") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"config.json: vision_config is {given!r}; want an object")
    return {**defaults, **{name: value for name, value in given.items() if value is not None}}


def of_text(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What it says of the language model beside."""
    text = raw.get("text_config")
    return text if isinstance(text, Mapping) else {}


def check_only(config: Mapping[str, Any], only: Mapping[str, tuple[Any, ...] | None], where: str) -> None:
    """Refuse what would change the result and is not supported: fields with none of their values. None: any will do."""
    for name, allowed in only.items():
        if allowed is not None and name in config and config[name] not in allowed:
            wanted = ", ".join(map(repr, allowed)) or "none"
            raise ValueError(
                f"config.json: {where}{name} is {config[name]!r}, which would change the result; supported: {wanted}"
            )


def sizes_of(config: Mapping[str, Any], text: Mapping[str, Any], text_size: int) -> dict[str, Any]:
    """Of a `VisionConfig`, where an encoder's fields have the names that most have; `text`: of the language model
    beside, whose size is `text_size` where that is silent."""
    hidden = positive(config, "hidden_size")
    return {
        "num_layers": positive(config, "num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": heads_of(config, "num_attention_heads", hidden),
        "inner_size": positive(config, "intermediate_size"),
        "out_size": positive(text, "hidden_size", text_size),
    }


def heads_of(config: Mapping[str, Any], name: str, hidden: int) -> int:
    """How many heads share so many numbers."""
    heads = positive(config, name)
    if hidden % heads or hidden // heads % 4 or hidden // heads > _MOST_OF_HEAD:
        raise ValueError(
            f"config.json: vision_config has {heads} heads of {hidden} numbers together; want of each a multiple of 4 "
            f"up to {_MOST_OF_HEAD}"
        )
    return heads


def of_square(value: object) -> object:
    """Files may give both sides of one."""
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
        return value[0]
    return value


def out_size_of(raw: Mapping[str, Any], name: str, out: int) -> int:
    """Of rows that the encoder makes, which its field of this name says: the language model's hidden size."""
    text = raw.get("text_config") or raw
    hidden = text.get("hidden_size", out) if isinstance(text, Mapping) else out
    if hidden != out:
        raise ValueError(
            f"config.json: vision_config.{name} is {out}; want the language model's hidden_size, {hidden!r}"
        )
    return out


def sections_of(raw: Mapping[str, Any], usual: tuple[int, int, int], *, interleaved: bool) -> tuple[int, int, int]:
    """How many frequencies of the language model turn by time, by row, by column; they take turns or not, as its family
    does."""
    text = raw.get("text_config") or raw
    rope = (text.get("rope_scaling") or text.get("rope_parameters") or {}) if isinstance(text, Mapping) else {}
    given = rope.get("mrope_section", list(usual)) if isinstance(rope, Mapping) else rope
    if not isinstance(given, list) or len(given) != 3 or not all(type(one) is int and one >= 0 for one in given):
        raise ValueError(f"config.json: mrope_section is {given!r}; want three numbers")
    if isinstance(rope, Mapping) and rope.get("mrope_interleaved", interleaved) is not interleaved:
        said = f"mrope_interleaved is {rope['mrope_interleaved']!r}"
        raise ValueError(f"config.json: {said}, which would change the result; supported: {interleaved}")
    return given[0], given[1], given[2]


def check_agrees(images: Mapping[str, Any], **sizes: int) -> None:
    """Refuse settings of images that name other sizes than config.json does."""
    for name, size in sizes.items():
        if images.get(name, size) != size:
            said = f"preprocessor_config.json: {name} is {images[name]!r}"
            raise ValueError(f"{said}; want {size}, as config.json's vision_config has it")


def theta_of(config: Mapping[str, Any]) -> float:
    """Base of the angles by which patches turn."""
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or rope.get("rope_type", "axial") not in ("axial", "default"):
        raise ValueError(f"config.json: vision_config.rope_parameters is {rope!r}; supported: of rope_type 'axial'")
    return number({"rope_theta": config.get("rope_theta", 10_000.0), **rope}, "rope_theta", 10_000.0)
