"""The eye: a vision encoder that makes of an image a row for each of its tokens.

Each image is encoded by itself, so its rows depend on nothing else. Knows sizes and what lies where; what layers do is
in `vision_layers.py`. Knows nothing of prompts.

Shape suffixes: H x W pixels, P patches, N tokens of an image, D the encoder's hidden size, O the language model's, R
rotary dimension, F frequencies, A positions of the table.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tercet.model.config import ModelConfig
from tercet.model.dummy import DummyCheckpoint
from tercet.model.gemma4_tower import gemma4_weights
from tercet.model.glm_tower import glm_weights
from tercet.model.image_grid import ImageGrid, image_grid
from tercet.model.internvl_tower import internvl_weights
from tercet.model.pixtral_tower import pixtral_weights
from tercet.model.places import Move
from tercet.model.qwen_tower import qwen_weights
from tercet.model.rope import Rope, rotary_table
from tercet.model.siglip_tower import siglip_weights
from tercet.model.vision_config import VisionConfig
from tercet.model.vision_layers import Segments, Stream, VisionLayers, normed
from tercet.model.vision_places import VisionPlaces
from tercet.model.vision_weights import VisionWeights, fill_vision, shapes_of
from tercet.model.weights import Files, carry_out
from tercet.triton_kernels.axis_turns import axis_turns
from tercet.triton_kernels.cubic_positions import add_cubic_positions
from tercet.triton_kernels.embedding import embedding
from tercet.triton_kernels.grid_positions import add_grid_positions
from tercet.triton_kernels.image_patches import image_patches
from tercet.triton_kernels.residual_add import residual_add
from tercet.triton_kernels.tile_rows import tile_rows
from tercet.triton_kernels.tuning import ROW_BUCKETS

_GRIDS = 64
"""Sizes of images of which is kept how their patches lie."""
_POSITIONS = 512
"""Rows or columns of patches whose angles are known from the start."""


class Seen(NamedTuple):
    """What the language model gets of an image."""

    rows_NO: Tensor
    """In the place of embeddings."""
    deep: tuple[Tensor, ...]
    """[N, O]: what is added to the tokens' hidden states behind its first layers, one after the other."""


class Vision:
    """An encoder on one device."""

    def __init__(
        self, config: VisionConfig, weights: VisionWeights, moves: list[Move], device: torch.device, *,
        deterministic: bool,
    ) -> None:  # fmt: skip
        """`moves`: what fills the weights."""
        self.config = config
        self._weights, self._moves, self._device = weights, moves, device
        self._layers = VisionLayers(config, weights, deterministic=deterministic)
        mean, deviation = torch.tensor(config.mean), torch.tensor(config.deviation)
        self._normal_23 = torch.stack((1 / (255 * deviation), -mean / deviation)).to(device)
        self._axis_F = torch.tensor([0, 1], dtype=torch.int32).repeat_interleave(config.head_dim // 4).to(device)
        self._table_AR = self._table(_POSITIONS) if config.theta else None
        self._grid = functools.lru_cache(_GRIDS)(lambda rows, columns: image_grid(rows, columns, config, device))

    def read(self, files: Files) -> None:
        """Other weights into the tensors there are, while nothing is encoded. ValueError: its tensors do not fit, and
        nothing has been read; or something is wrong with the files."""
        fill_vision(self._moves, files)
        self._weights.scale()

    def draw(self, seed: int) -> None:
        """Random weights."""
        dtype = self._weights.patches.weight_NK.dtype
        carry_out(self._moves, DummyCheckpoint(shapes_of(self._moves), seed, dtype, self._device))
        self._weights.scale()

    def encode(self, pixels_HW3: Tensor) -> Seen:
        """An image's rows. Its sides are multiples of a token's; its pixels are of uint8, on this device."""
        config, patches = self.config, self._weights.patches
        rows, columns = self._rows_and_columns(pixels_HW3)
        grid: ImageGrid = self._grid(rows, columns)
        patches_PK = image_patches(
            pixels_HW3, grid.places_P2, self._normal_23, config.patch, config.frames, patches.weight_NK.dtype
        )
        stream_PD = self._layers.linear(patches_PK, patches)
        if self._weights.first_norm is not None:
            stream_PD = normed(stream_PD, self._weights.first_norm)
        stream = Stream(self._placed(stream_PD, grid, rows, columns))
        segments = Segments(grid, self._turns(grid, max(rows, columns)))
        deep = self._layers.run(stream, segments)
        rows_NO = self._layers.rows(stream, grid)
        return Seen(rows_NO if grid.back_N is None else embedding(grid.back_N, rows_NO), deep)

    def _placed(self, stream_PD: Tensor, grid: ImageGrid, rows: int, columns: int) -> Tensor:
        """With learned positions, if there are any. Uses up what it is given."""
        positions_GD, first_D = self._weights.positions_GD, self._weights.first_D
        if positions_GD is None:
            return stream_PD
        if self.config.axis_positions:
            rows_P, columns_P = grid.axes_2P
            columns_GD, rows_GD = positions_GD.chunk(2)
            places_PD = residual_add(embedding(rows_P, rows_GD), embedding(columns_P, columns_GD))
            return residual_add(places_PD, stream_PD)
        if first_D is not None:
            return tile_rows(stream_PD, first_D, positions_GD, grid.places_P2)
        add_positions = add_cubic_positions if self.config.cubic else add_grid_positions
        add_positions(stream_PD, positions_GD, grid.places_P2, rows, columns)
        return stream_PD

    def tables(self, pixels_HW3: Tensor) -> tuple[ImageGrid, Tensor | None]:
        """What encoding an image of this size reads besides pixels and weights."""
        return self._grid(*self._rows_and_columns(pixels_HW3)), self._table_AR

    def _rows_and_columns(self, pixels_HW3: Tensor) -> tuple[int, int]:
        """Of its patches."""
        (H, W, _), side = pixels_HW3.shape, self.config.side
        if not H or not W or H % side or W % side:
            raise ValueError(f"pixels: got an image of {H} x {W}, wanted sides that are multiples of {side}")
        only, tiles = self.config.length * side, self.config.tiles
        if only and (W - only or (H % only if tiles else H - only)):
            raise ValueError(
                f"pixels: got an image of {H} x {W}, wanted {'a multiple of ' if tiles else ''}{only} x {only}"
            )
        return H // self.config.patch, W // self.config.patch

    def warm_up(self, most_tokens: int) -> None:
        """Encode black images of several sizes, the largest of so many tokens: then the kernels for any number of rows
        up to there are compiled, and the memory that the largest image takes has been had."""
        for rows, columns in self._telling_sizes(most_tokens):
            size = rows * self.config.side, columns * self.config.side, 3
            self.encode(torch.zeros(size, dtype=torch.uint8, device=self._device))

    def _telling_sizes(self, most_tokens: int) -> list[tuple[int, int]]:
        """Rows and columns of tokens: of images whose products have as many rows as any kernel is chosen by."""
        each, length, tiles = self.config.merge**2, self.config.length, self.config.tiles
        if length and not tiles:
            return [(length, length)]
        least = (length**2, length**2 * each, length**2 * each + 1) if tiles else (1, each)
        most = max(most_tokens // least[0], 1)
        counts = {most, *(bucket // size for bucket in ROW_BUCKETS for size in least)}
        fitting = sorted(count for count in counts if 0 < count <= most)
        return [(length * count, length) if tiles else (1, count) for count in fitting]

    def _turns(self, grid: ImageGrid, longest: int) -> Tensor | None:
        """Each patch's cosines and sines: half of the frequencies turn by its row, half by its column."""
        if self._table_AR is None:
            return None
        if longest > len(self._table_AR):
            self._table_AR = self._table(longest)
        turns_PR = self._table_AR.new_empty(len(grid.places_P2), self._table_AR.shape[1])
        axis_turns(self._table_AR, grid.places_P2, self._axis_F, turns_PR)
        return turns_PR

    def _table(self, num_positions: int) -> Tensor:
        """Of each position cosines of rows' frequencies, then of columns', then sines."""
        config = self.config
        table = rotary_table(Rope(config.theta), config.head_dim, num_positions, self._device)
        columns = 0 if config.shared_angles else 1
        return torch.cat([part[:, first::2] for part in table.chunk(2, 1) for first in (0, columns)], 1)


def empty_vision(config: VisionConfig, dtype: torch.dtype, device: torch.device, *, deterministic: bool) -> Vision:
    """One whose weights nobody has filled."""
    places = VisionPlaces(config, dtype, device)
    of_names = {
        "gemma4": gemma4_weights, "glm": glm_weights, "internvl": internvl_weights, "pixtral": pixtral_weights,
        "siglip": siglip_weights,
    }  # fmt: skip
    weights = of_names.get(config.names, qwen_weights)(places)
    return Vision(config, weights, places.moves, device, deterministic=deterministic)


def load_vision(
    files: Files | None, config: ModelConfig, vision: VisionConfig, dtype: torch.dtype, device: torch.device,
    seed: int = 0, *, deterministic: bool = False,
) -> Vision:  # fmt: skip
    """The eye of a language model, with its weights read from all of a checkpoint's files, or without any with random
    ones of this seed. ValueError names tensors that are missing, surplus, misshapen or no plain numbers."""
    if vision.out_size != config.hidden_size:
        raise ValueError(
            f"config.json: images become rows of {vision.out_size} numbers; want the language model's hidden_size, "
            f"{config.hidden_size}"
        )
    eye = empty_vision(vision, dtype, device, deterministic=deterministic)
    if files is None:
        eye.draw(seed)
    else:
        eye.read(files)
    return eye
