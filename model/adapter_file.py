"""One adapter (LoRA) as its folder has it, in the layout of PEFT: which matrices it changes, of what rank, how much.

What would make other numbers and is not supported is refused by name. Knows names and the folder; knows no rank and no
device (`adapters.py`).
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tercet.model.config_fields import number, positive
from tercet.model.config_json import read_object
from tercet.model.safetensors_files import SafetensorsCheckpoint, shown

log = logging.getLogger(__name__)

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
MOST_RANK = 512
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "target_parameters": (None, []),
    "use_bdlora": (None, False),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}
"""Settings that change the result, with the values that leave it alone."""
_READ = frozenset({"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"})
_HARMLESS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "peft_version", "inference_mode"),
        # What tensors there are says it all; or of training alone.
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core"),
        *("lora_dropout", "runtime_config", "ensure_weight_tying", "qalora_group_size", "velora_config"),
    }
)
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways of beginning with which the model's own weights are no longer what they were."""
_NAME = re.compile(
    r"base_model\.model\.(?:(?:model|language_model|language_model\.model|model\.language_model)\.)?"
    r"layers\.(\d{1,9})\.((?:self_attn|linear_attn|mlp)\.[a-z_]+)\.lora_([AB])(?:\.default)?\.weight"
)


@dataclass(frozen=True)
class Pair:
    """The two matrices for one of the model's."""

    down: str
    up: str
    rank: int
    scale: float


class AdapterFile:
    """`pairs`: by layer and module, as (0, "self_attn.q_proj"). ValueError names what is wrong or not supported."""

    def __init__(self, folder: Path, *, pinned: bool = False) -> None:
        self._settings = _read_settings(folder / _CONFIG)
        self.tensors = SafetensorsCheckpoint(folder, pinned=pinned, only=_TENSORS)
        self.tensors.check_plain()
        self.pairs = self._pairs()

    def _pairs(self) -> dict[tuple[int, str], Pair]:
        found: dict[tuple[int, str], dict[str, str]] = {}
        for name in self.tensors.shapes():
            match = _NAME.fullmatch(name)
            if match is None:
                wanted = "only lora_A and lora_B of linear layers in attention and dense MLPs"
                raise ValueError(f"{self.tensors.source}: tensor {shown(name)} is not supported; want {wanted}")
            names = found.setdefault((int(match[1]), match[2]), {})
            if match[3] in names:
                raise ValueError(f"{self.tensors.source}: tensors {names[match[3]]} and {name} are for the same matrix")
            names[match[3]] = name
        if not found:
            raise ValueError(f"{self.tensors.source} has no tensors; want those of a LoRA adapter")
        return {key: self._pair(key, names) for key, names in found.items()}

    def _pair(self, key: tuple[int, str], names: Mapping[str, str]) -> Pair:
        if len(names) < 2:
            (name,) = names.values()
            raise ValueError(f"{self.tensors.source}: tensor {name} is alone; want lora_A and lora_B")
        shapes = self.tensors.shapes()
        down, up = shapes[names["A"]], shapes[names["B"]]
        rank, scale = self._scaling(f"model.layers.{key[0]}.{key[1]}")
        if len(down) != 2 or len(up) != 2 or not down[0] == up[1] == rank:
            raise ValueError(
                f"{self.tensors.source}: tensors {names['A']} {list(down)} and {names['B']} {list(up)}; want matrices "
                f"of rank {rank}, as {_CONFIG} says"
            )
        return Pair(names["A"], names["B"], rank, scale)

    def _scaling(self, module: str) -> tuple[int, float]:
        """The rank of a module and what its product is multiplied by."""
        settings = self._settings
        rank = _of_pattern(settings, "rank_pattern", module)
        alpha = _of_pattern(settings, "alpha_pattern", module)
        rank = positive(settings, "r", most=MOST_RANK) if rank is None else rank
        alpha = number(settings, "lora_alpha", 8) if alpha is None else alpha
        return int(rank), alpha / rank**0.5 if settings.get("use_rslora") else alpha / rank


def _of_pattern(settings: Mapping[str, Any], name: str, module: str) -> float | None:
    """As PEFT looks it up: the first expression that a whole name, or what is behind a dot of it, matches."""
    for pattern, value in (settings.get(name) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return float(value)
    return None


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = read_object(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is not there; want the folder of an adapter") from None
    for name, allowed in _ONLY.items():
        if settings.get(name) not in allowed:
            wanted = " or ".join(map(repr, allowed))
            raise ValueError(f"{path}: {name} is {settings.get(name)!r}, which is not supported; want {wanted}")
    begun = settings.get("init_lora_weights")
    if isinstance(begun, str) and begun.startswith(_CHANGES_BASE):
        text = "its pairs are for weights changed by it; want it converted to plain LoRA (PEFT's save_pretrained can)"
        raise ValueError(f"{path}: init_lora_weights is {begun!r}: {text}")
    others = settings.keys() - _ONLY.keys() - _READ - _HARMLESS
    if unknown := sorted(name for name in others if settings[name]):
        log.warning("%s: not known, and not used: %s", path, ", ".join(map(shown, unknown)))
    for name in ("rank_pattern", "alpha_pattern"):
        _check_pattern(path, name, settings.get(name) or {})
    positive(settings, "r", most=MOST_RANK, file=str(path))
    number(settings, "lora_alpha", 8, file=str(path))
    return settings


def _check_pattern(path: Path, name: str, pattern: object) -> None:
    if not isinstance(pattern, dict):
        raise ValueError(f"{path}: {name} is {pattern!r}; want an object")
    for expression, value in pattern.items():
        try:
            re.compile(expression)
        except re.error as error:
            raise ValueError(f"{path}: {name} has {expression!r}: {error}; want a regular expression") from None
        whole = name == "rank_pattern"
        wanted = f"1 to {MOST_RANK}" if whole else "a number more than 0"
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not 0 < value < 1e6:
            raise ValueError(f"{path}: {name} has {value!r} for {expression!r}; want {wanted}")
