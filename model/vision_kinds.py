"""What sets the vision encoders of Qwen's families apart: settings that one always has, and what config.json may leave
out.

Knows fields and their values as transformers means them; `qwen_vision.py` reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tercet.model.vision_fields import ACTIVATIONS
from tercet.model.vision_pixels import CLIP, HALVES, Normalisation

_ONLY: dict[str, tuple[Any, ...] | None] = {
    "in_channels": (3,),
    "in_chans": (3,),
    "hidden_act": tuple(ACTIVATIONS),
    "deepstack_visual_indexes": ([],),
    # Other names that transformers takes for some sizes.
    **dict.fromkeys(("num_attention_heads", "num_hidden_layers", "head_dim"), ()),
}


@dataclass(frozen=True)
class Kind:
    """A family."""

    early: bool
    """Its tensors are called as in Qwen2-VL, its patches have no bias, and positions only turn queries and keys."""
    hidden: str
    """The field with the encoder's own hidden size."""
    out: str
    """And that with the language model's."""
    defaults: Mapping[str, Any]
    sections: tuple[int, int, int]
    normalisation: Normalisation
    own: Mapping[str, tuple[Any, ...] | None] = field(default_factory=dict)
    """Fields' values that are supported, where others support other ones. None: it reads them, whatever they are."""

    @property
    def gated(self) -> bool:
        """MLPs have gates, norms divide by the root of the mean square alone, and some layers have windows."""
        return "window_size" in self.defaults

    @property
    def deep(self) -> bool:
        """What some layers see is made into rows, too."""
        return "deepstack_visual_indexes" in self.defaults

    @property
    def only(self) -> Mapping[str, tuple[Any, ...] | None]:
        """Fields' values that are supported, of those that would change the result. None: all are."""
        return {**_ONLY, **self.own}


_SHARED = {"num_heads": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
_EARLY = {**_SHARED, "depth": 32, "patch_size": 14}
_LATER = {
    **_SHARED,
    "depth": 27,
    "patch_size": 16,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "hidden_act": "gelu_pytorch_tanh",
}
_QWEN2 = Kind(
    True, "embed_dim", "hidden_size",
    {**_EARLY, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "hidden_act": "quick_gelu"},
    (16, 24, 24), CLIP,
)  # fmt: skip
_WITH_WINDOWS = {
    **_EARLY,
    "hidden_size": 3584,
    "out_hidden_size": 3584,
    "intermediate_size": 3420,
    "hidden_act": "silu",
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_QWEN2_5 = Kind(
    True, "hidden_size", "out_hidden_size", _WITH_WINDOWS, (16, 24, 24), CLIP, {"hidden_act": ("silu", "swish")}
)  # fmt: skip
_DEEP = {**_LATER, "deepstack_visual_indexes": [8, 16, 24]}
_QWEN3 = Kind(
    False, "hidden_size", "out_hidden_size", _DEEP, (24, 20, 20), HALVES, {"deepstack_visual_indexes": None}
)  # fmt: skip
_QWEN3_5 = Kind(False, "hidden_size", "out_hidden_size", _LATER, (11, 11, 10), HALVES)
KINDS = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2_5,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
}
"""By the model_type of the whole checkpoint."""
