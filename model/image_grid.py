"""An image's patches in the order in which its encoder has them, and who attends to whom.

The patches of a token lie together, row by row; tokens as in the image, or window by window. Knows sizes; knows no
pixels.

Shape suffixes: P patches, N tokens, S windows. A tile is a window with one more row than patches.
"""

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tercet.model.vision_config import VisionConfig


@dataclass(frozen=True)
class ImageGrid:
    """Of one size of images."""

    places_P2: Tensor
    """Each patch's row and column."""
    axes_2P: Tensor
    """All rows, then all columns."""
    ends_1: Tensor
    """Where attention to the whole image ends: behind the last patch."""
    ends_S: Tensor
    """Where windows end, if there are any."""
    longest: int
    """Rows of the largest window."""
    patches_P: Tensor | None
    """Which of the encoder's rows each patch is, if others are among them."""
    back_N: Tensor | None
    """Which of the encoder's tokens each of the image's is, if they are in another order; -1: a word between rows."""


def image_grid(rows: int, columns: int, config: VisionConfig, device: torch.device) -> ImageGrid:
    """Of an image of so many patches, multiples of a token's."""
    merge, window = config.merge, config.window
    token_rows, token_columns = rows // merge, columns // merge
    numbers = torch.arange(token_rows * token_columns).view(token_rows, token_columns)
    side = window or max(token_rows, token_columns)
    windows = [part for band in numbers.split(side, 0) for part in band.split(side, 1)]
    order_N = torch.cat([part.flatten() for part in windows])
    inside = torch.arange(merge)
    # [tokens, rows of one, columns of one]
    row = (order_N // token_columns * merge)[:, None, None] + inside[:, None]
    column = (order_N % token_columns * merge)[:, None, None] + inside[None, :]
    places_P2 = torch.stack(torch.broadcast_tensors(row, column), -1).view(-1, 2)
    sizes = [part.numel() * merge**2 + config.tiles for part in windows]
    return ImageGrid(
        places_P2=places_P2.to(device, torch.int32),
        axes_2P=places_P2.t().contiguous().to(device, torch.int32),
        ends_1=torch.tensor([rows * columns], dtype=torch.int32, device=device),
        ends_S=torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32, device=device),
        longest=max(sizes),
        patches_P=_patches(rows * columns, config, device),
        back_N=_back(order_N, token_columns, config, device),
    )


def _patches(count: int, config: VisionConfig, device: torch.device) -> Tensor | None:
    if not config.tiles:
        return None
    patches_P = torch.arange(count)
    return (patches_P + patches_P // config.positions**2 + 1).to(device, torch.int32)


def _back(order_N: Tensor, columns: int, config: VisionConfig, device: torch.device) -> Tensor | None:
    if (not config.window or config.tiles) and not config.breaks:
        return None
    back_N = order_N.argsort()
    if config.breaks:
        back_N = F.pad(back_N.view(-1, columns), (0, 1), value=-1).flatten()
    return back_N.to(device, torch.int32)
