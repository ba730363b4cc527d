"""How large images become before a model sees them: of whole tokens, near the shape that they have.

Families bound them in two ways, or not at all; one cuts them into tiles. Numbers only; as in transformers, to the
pixel.
"""

import math
from dataclasses import dataclass

_MOST_STRETCHED = 200
"""One side may be so many times the other, where pixels are counted; as in transformers."""


@dataclass(frozen=True)
class PixelBounds:
    """An image has neither too few pixels nor too many: Qwen's families and GLM's."""

    least: int
    most: int
    frames: int = 1
    """A picture counts as so many that are alike: GLM's."""
    enlarges: bool = False
    """One that is narrower than a token is made larger first: GLM's, too."""

    def final_size(self, height: int, width: int, unit: int) -> tuple[int, int]:
        """Height and width of an image of this size. `unit`: pixels of a token's side. Raises `ValueError` for what is
        stretched too far."""
        given = f"{width} x {height} pixels"
        if self.enlarges and 0 < min(height, width) < unit:
            factor = unit / min(height, width)
            height, width = int(height * factor), int(width * factor)
        if min(height, width) < 1 or max(height, width) / min(height, width) > _MOST_STRETCHED:
            wanted = f"want sides of which none is more than {_MOST_STRETCHED} times the other"
            raise ValueError(f"{given}; {wanted}")
        whole, pixels = (round(height / unit) * unit, round(width / unit) * unit), self.frames * height * width
        if self.frames * whole[0] * whole[1] > self.most:
            shrink = math.sqrt(pixels / self.most)
            return (
                max(unit, math.floor(height / shrink / unit) * unit),
                max(unit, math.floor(width / shrink / unit) * unit),
            )
        if self.frames * whole[0] * whole[1] < self.least:
            stretch = math.sqrt(self.least / pixels)
            return math.ceil(height * stretch / unit) * unit, math.ceil(width * stretch / unit) * unit
        return whole

    def most_tokens(self, unit: int) -> int:
        """Of an image, but for words between its rows."""
        return self.most // (self.frames * unit**2)


@dataclass(frozen=True)
class SideBounds:
    """An image is no higher and no wider than so, and never made larger but for whole tokens: Pixtral."""

    height: int
    width: int

    def final_size(self, height: int, width: int, unit: int) -> tuple[int, int]:
        """As above. Raises `ValueError` for what is so stretched that nothing would be left of one side."""
        sides = height, width
        shrink, most = max((height / self.height, self.height), (width / self.width, self.width))
        if shrink > 1:
            sides = math.floor(height / shrink), math.floor(width / shrink)
        if min(sides) < 1:
            wanted = f"want sides of which none is more than {most} times the other"
            raise ValueError(f"{width} x {height} pixels; {wanted}")
        return -(-sides[0] // unit) * unit, -(-sides[1] // unit) * unit

    def most_tokens(self, unit: int) -> int:
        """As above."""
        return -(-self.height // unit) * -(-self.width // unit)


@dataclass(frozen=True)
class OneSize:
    """All images have the same, whatever their shape: Gemma 3."""

    height: int
    width: int

    def final_size(self, height: int, width: int, unit: int) -> tuple[int, int]:
        """As above."""
        return self.height, self.width

    def most_tokens(self, unit: int) -> int:
        """As above."""
        return self.height // unit * (self.width // unit)


@dataclass(frozen=True)
class Tiles:
    """An image is stretched over a grid of squares that has nearly its shape, and is cut into these; where they are
    several, a small one of all of it follows. One below the other they are what the model gets: InternVL."""

    side: int
    """Of a square, in pixels."""
    least: int
    """Squares of a grid."""
    most: int

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Columns and rows. Of grids that fit alike it is the largest whose pixels are less than twice the image's; or
        else the smallest."""
        counts = range(1, self.most + 1)
        grids = [(columns, rows) for columns in counts for rows in counts]
        grids = sorted((grid for grid in grids if self.least <= math.prod(grid) <= self.most), key=math.prod)
        misfits = [abs(width / height - columns / rows) for columns, rows in grids]
        nearest = min(misfits)
        first, *others = (grid for grid, misfit in zip(grids, misfits, strict=True) if misfit == nearest)
        large = [grid for grid in others if height * width > 0.5 * self.side**2 * math.prod(grid)]
        return large[-1] if large else first

    def final_size(self, height: int, width: int, unit: int) -> tuple[int, int]:
        """As above."""
        return self.side * _with_small(math.prod(self.grid(height, width))), self.side

    def most_tokens(self, unit: int) -> int:
        """As above."""
        return (self.side // unit) ** 2 * _with_small(self.most)


def _with_small(squares: int) -> int:
    return squares + 1 if squares > 1 else 1


@dataclass(frozen=True)
class TokenBound:
    """An image is made as large as fits in so many tokens, whatever size it has: Gemma 4."""

    most: int

    def final_size(self, height: int, width: int, unit: int) -> tuple[int, int]:
        """As above. What is more stretched than its tokens in one row has these, or as many as it is stretched."""
        factor = math.sqrt(self.most * unit**2 / (height * width))
        rows, columns = math.floor(factor * height / unit), math.floor(factor * width / unit)
        if not rows:
            rows, columns = 1, min(width // height, self.most)
        elif not columns:
            rows, columns = min(height // width, self.most), 1
        return rows * unit, columns * unit

    def most_tokens(self, unit: int) -> int:
        """As above."""
        return self.most


SizeBounds = PixelBounds | SideBounds | OneSize | Tiles | TokenBound
