"""The weights of a vision encoder, and how they are read from a checkpoint. Every rank has all of them.

Which tensors fill which places is in `qwen_tower.py`, `pixtral_tower.py`, `siglip_tower.py`, `internvl_tower.py`,
`glm_tower.py` and `gemma4_tower.py`.

Shape suffixes: N output columns of a product, D the encoder's hidden size, F inner size (filled up), K numbers of a
patch, E numbers of a token's patches, G positions, O the language model's hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from tercet.model.places import Move
from tercet.model.renamed import Renamed
from tercet.model.safetensors_files import PLAIN
from tercet.model.weights import Files, carry_out, check_names, misfit

_BASE, _TOWER = "model.", "vision_tower."
_PREFIXES = "visual.", _TOWER, "multi_modal_projector.", "embed_vision."
_IN_TOWER = f"{_TOWER}vision_model."
"""Files of Gemma 3 begin so where versions of transformers write a tower's name alone."""
_OF_WHOLE = f"{_TOWER}head."
"""What some towers make of an image as a whole, which is no token's."""


@dataclass(frozen=True)
class Norm:
    weight_D: Tensor
    bias_D: Tensor | None
    """None: it divides by the root of the mean square, and no more."""
    eps: float


@dataclass(frozen=True)
class Linear:
    weight_NK: Tensor
    bias_N: Tensor | None


@dataclass(frozen=True)
class ClippedLinear:
    """Products of the same rows, side by side, of each of which both what goes in and what comes out is clipped."""

    weights: tuple[Tensor, ...]
    bounds_P22: Tensor
    """Of each the lower and the upper bound of what goes in, then of what comes out, in fp32."""


@dataclass(frozen=True)
class VisionLayer:
    norm1: Norm
    qkv: Linear | ClippedLinear
    o: Linear | ClippedLinear
    norm2: Norm
    up: Linear | ClippedLinear
    """[F, D], or [2 F, D]: rows for gates, then the others."""
    down: Linear | ClippedLinear
    qk_norm_J: Tensor | None = None
    """What queries are scaled by when they are normed, all heads' as one row, then keys."""
    scales: tuple[Tensor, Tensor] | None = None
    """What files want the results of `o` and of `down` multiplied by: these products have it in them."""
    head_norm_3D: Tensor | None = None
    """What each head's queries, keys and values are scaled by when they are normed."""
    norms_behind: tuple[Norm, Norm] | None = None
    """Of the results of `o` and of `down`, before they are added."""


@dataclass(frozen=True)
class Merger:
    """Of a token's patches makes a row for the language model."""

    norm: Norm
    """Of patches, or of tokens."""
    join: Linear | None
    """Of a token's patches makes one; None: what comes next reads all of them."""
    first: Linear
    second: Linear


@dataclass(frozen=True)
class GatedMerger:
    """Makes it by an MLP with gates."""

    norm: Norm
    """Of patches."""
    join: Linear
    """Of a token's patches makes one row."""
    first: Linear
    first_norm: Norm
    """Of what that makes."""
    up: Linear
    """Rows for gates, then the others."""
    down: Linear


@dataclass(frozen=True)
class Pooler:
    """Makes it of a token's patches' mean."""

    norm: Norm
    """Of patches."""
    norm_of_mean: Norm
    out: Linear


@dataclass(frozen=True)
class MeanPooler:
    """Makes it of the mean of what the layers leave, times the root of the hidden size."""

    standard: tuple[Tensor, Tensor] | None
    """What that is shifted down by, and then scaled."""
    norm_of_mean: Norm
    out: Linear


@dataclass(frozen=True)
class VisionWeights:
    patches: Linear
    positions_GD: Tensor | None
    """Those by axes: columns' ahead of rows'."""
    first_norm: Norm | None
    """Of patches, before positions are added."""
    layers: tuple[VisionLayer, ...]
    merger: Merger | GatedMerger | Pooler | MeanPooler
    deep: tuple[Merger, ...]
    first_D: Tensor | None = None
    """What is ahead of the patches of each tile."""
    last_norm: Norm | None = None

    def scale(self) -> None:
        """Once all of it has been read: what layers add to the stream is multiplied where it is made, and no kernel
        has to do it."""
        for layer in self.layers:
            if layer.scales is None:
                continue
            for product, scale_D in zip((layer.o, layer.down), layer.scales, strict=True):
                assert isinstance(product, Linear)
                product.weight_NK.copy_(product.weight_NK.float() * scale_D[:, None])
                if product.bias_N is not None:
                    product.bias_N.copy_(product.bias_N.float() * scale_D)


def shapes_of(moves: Sequence[Move]) -> Mapping[str, tuple[int, ...]]:
    """The tensors that are read, by their names here."""
    return {move.name: move.shape for move in moves}


def vision_tensors(whole: Files) -> Files:
    """Those of what looks at images, by the names that they have where nothing is ahead of these."""
    names = {name.removeprefix(_BASE).replace(_IN_TOWER, _TOWER): name for name in whole.shapes()}
    return Renamed(
        whole,
        {here: name for here, name in names.items() if here.startswith(_PREFIXES) and not here.startswith(_OF_WHOLE)},
    )


def fill_vision(moves: Sequence[Move], files: Files) -> None:
    """Read what fills these places. ValueError names tensors that are missing, surplus, misshapen or no plain numbers;
    then nothing has been read."""
    eye = vision_tensors(files)
    check_names(files.source, shapes_of(moves), eye.shapes())
    for move in moves:
        if eye.dtype_of(move.name) not in PLAIN:
            raise misfit(eye, move.name, "plain numbers")
    carry_out(moves, eye)
