"""The vision encoder inside a checkpoint that can also see, and how it wants pixels.

What sets the families apart are fields here; but for what tensors are called nothing behind asks for a family's name.
Knows sizes and settings; knows neither a file nor a tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class VisionConfig:
    """An encoder of patches, whose squares of `merge` x `merge` become tokens of the language model."""

    num_layers: int
    hidden_size: int
    num_heads: int
    inner_size: int
    """Of its MLPs."""
    out_size: int
    """The language model's hidden size."""
    patch: int
    """Pixels of a patch's side."""
    merge: int
    """Patches of a token's side."""
    activation: str
    """Of MLPs, one of `gelu`'s kinds; "silu" and "gelu": they have gates."""
    eps: float
    """Of its layers' norms."""
    out_eps: float
    """Of the norm behind them."""
    rms_norms: bool
    patch_bias: bool
    out_bias: bool
    """Of the products behind the layers."""
    names: Literal["qwen2", "qwen3", "pixtral", "siglip", "internvl", "glm", "gemma4"]
    """Whose names its tensors have."""
    mean: tuple[float, ...]
    """Of red, green and blue from 0 to 1, which pixels are shifted by."""
    deviation: tuple[float, ...]
    """And then divided by."""
    frames: int = 1
    """How often a still picture is there in each of its patches, which were made for films."""
    theta: float = 0.0
    """Base of the angles by which queries and keys turn; 0: they do not."""
    shared_angles: bool = False
    """A patch's row and its column turn by the same frequencies; else they have every other one each."""
    positions: int = 0
    """Side of the square of learned positions, stretched over each image; 0: there are none."""
    cubic: bool = False
    """Between those a curve goes through four each way; else what lies there is linear."""
    axis_positions: int = 0
    """Learned positions of columns, and as many of rows, of which each patch gets one each; 0: there are none."""
    window: int = 0
    """Side of the squares of tokens within which layers attend; 0: all layers attend to the whole image."""
    whole_layers: frozenset[int] = frozenset()
    """Those that do, if others have windows."""
    deep_layers: tuple[int, ...] = ()
    """Behind which layers what they see is also made into rows for the language model, in its layers' order."""
    sections: tuple[int, int, int] | None = None
    """How many frequencies of the language model turn by a token's time, by its row, by its column. None: tokens of
    images are turned as words are."""
    interleaved: bool = False
    """They take turns, instead of each having its part."""
    breaks: bool = False
    """Behind each row of an image's tokens a prompt has a word."""
    length: int = 0
    """Tokens along each side of an image, of which all have this size; 0: they have any."""
    both_ways: bool = False
    """To the language model tokens of an image see those behind them, too, up to its end."""
    in_windows: bool = False
    """Only in layers with a window."""
    most_tokens: int = 0
    """Of an image, where they have any size and that matters."""
    tiles: bool = False
    """An image is one or several squares of that length, one below the other, of which each is looked at by itself,
    with a row ahead of its patches that is none of theirs."""
    qkv_bias: bool = True
    qk_norms: bool = False
    """Queries of a patch are normed, all heads' as one row, and so are keys."""
    head_norms: bool = False
    """Queries, keys and values of each head are normed by themselves, and scores are not divided."""
    clipped: bool = False
    """What goes into the layers' products, and what comes out, is clipped, by bounds that files have."""
    standardized: bool = False
    """What is made of a token's patches is shifted and scaled, each number of it by itself."""
    out_inner_size: int = 0
    """Of the gated MLP that tokens go through behind the layers; 0: they go through none."""
    last_norm: bool = False
    """Patches are normed behind the layers, before tokens are made of them."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def gated(self) -> bool:
        return self.activation in ("silu", "gelu")

    @property
    def score_scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        return 1.0 if self.head_norms else self.head_dim**-0.5

    @property
    def patch_size(self) -> int:
        """Numbers of a patch."""
        return 3 * self.frames * self.patch**2

    @property
    def side(self) -> int:
        """Pixels of a token's side, of which an image's sides are multiples."""
        return self.patch * self.merge

    @property
    def at_once(self) -> int:
        """Tokens of an image that see each other, so that one step has to have all of them; 0: they do not."""
        return (self.most_tokens or self.length**2) if self.both_ways else 0

    def has_windows(self, layer: int) -> bool:
        return self.window > 0 and layer not in self.whole_layers


def axes(sections: Sequence[int], interleaved: bool, num_frequencies: int) -> list[int]:
    """By which of a token's three positions each frequency turns."""
    if interleaved:  # what exceeds the frequencies, or is left of them, is time's
        turns = [frequency % 3 for frequency in range(num_frequencies)]
        return [axis if frequency < 3 * sections[axis] else 0 for frequency, axis in enumerate(turns)]
    if sum(sections) != num_frequencies:
        raise ValueError(f"config.json: mrope_section is {list(sections)}; want a sum of {num_frequencies}")
    return [axis for axis, count in enumerate(sections) for _ in range(count)]
