"""Encoded images to the pixels that a model gets, as transformers' image processor makes them with Pillow.

Foreign bytes end here: whatever is wrong with a file is an `ImageRefused`. Pure, and of no thread; an event loop lets
others do this. Pillow is imported where the first image comes: an engine may serve text without it.
"""

import io
import secrets
from array import array
from dataclasses import dataclass
from hashlib import blake2b, shake_128
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tercet.engine.image_rules import ImageRules
from tercet.engine.image_sizes import Tiles
from tercet.engine.refusal import short
from tercet.ipc.images import IMAGE_IDS

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""What people's pictures come in. Pillow knows more, of which some run other programs."""
_MOST_PIXELS = 2**26
"""Of an image as it comes: larger than any camera's but a few, and 256 MiB of memory."""
_ID_BYTES = 4
_ON_A_SIDE = (5, 6, 7, 8)
"""As EXIF numbers the ways in which a camera may have been held."""
_PNGS_TURNS = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
"""Where a PNG may have that number."""


class ImageRefused(ValueError):
    """The message says what is wrong with the file."""


@dataclass(frozen=True)
class Pixels:
    """An image as the model gets it."""

    height: int
    width: int
    values: bytes
    """Red, green and blue, a byte each."""


def has_pillow() -> bool:
    """Whether any image can be read."""
    return find_spec("PIL") is not None


def size_of(data: bytes, rules: ImageRules) -> tuple[int, int]:
    """Height and width that it will have, as far as the file says without being decoded. Raises `ImageRefused`."""
    with _opened(data) as image:
        width, height = image.size
        if _is_turned(image, data):
            height, width = width, height
        return _final_size(height, width, rules)


def read_image(data: bytes, rules: ImageRules) -> Pixels:
    """The first picture of a file, upright, without transparency, in the size that the model wants. Raises
    `ImageRefused`."""
    from PIL import ImageOps

    with _opened(data) as image:
        try:
            # In this order, as transformers does: what is rounded when depends on it.
            ImageOps.exif_transpose(image, in_place=True)
            opaque = _opaque(image)
            height, width = _final_size(image.height, image.width, rules)
            if isinstance(rules.sizes, Tiles):
                values = _tiled(opaque, rules.sizes, rules.resample)
            else:
                values = opaque.resize((width, height), resample=rules.resample).tobytes()
        except ImageRefused:
            raise
        except Exception as error:  # noqa: BLE001  a decoder may raise anything
            raise ImageRefused(f"it cannot be decoded: {short(str(error) or type(error).__name__)}") from None
    return Pixels(height, width, values)


def _tiled(image: "Image", tiles: Tiles, resample: int) -> bytes:
    """Squares row by row, then the small one: each is made of all of the image."""
    side, (columns, rows) = tiles.side, tiles.grid(image.height, image.width)
    whole = image.resize((columns * side, rows * side), resample=resample)
    corners = [(column * side, row * side) for row in range(rows) for column in range(columns)]
    squares = [whole.crop((left, top, left + side, top + side)) for left, top in corners]
    if len(squares) > 1:
        squares.append(image.resize((side, side), resample=resample))
    return b"".join(square.tobytes() for square in squares)


def image_ids(name: bytes, count: int, key: bytes) -> "array[int]":
    """So many ids that an image of this name alone has, where names are digests of files: whoever does not know the key
    cannot make another with the same."""
    numbers = array("I", shake_128(blake2b(name, key=key).digest()).digest(_ID_BYTES * count))
    return array("i", [IMAGE_IDS | number & (IMAGE_IDS - 1) for number in numbers])


def new_key() -> bytes:
    """For `image_ids`."""
    return secrets.token_bytes(32)


def _opened(data: bytes) -> "Image":
    """Its beginning has been read, and is of a picture of a bearable size."""
    from PIL import Image

    Image.init()
    known = [name for name in _FORMATS if name in Image.OPEN]
    try:
        image = Image.open(io.BytesIO(data), formats=known)
    except Image.DecompressionBombError:
        raise ImageRefused(f"it has far too many pixels; want at most {_MOST_PIXELS}") from None
    except Exception:  # noqa: BLE001  as above
        kinds = ", ".join(known)
        raise ImageRefused(f"{len(data)} bytes that are no image; want a file of {kinds}") from None
    width, height = image.size
    if width * height > _MOST_PIXELS:
        image.close()
        raise ImageRefused(f"it has {width} x {height} pixels; want at most {_MOST_PIXELS} in all")
    return image


def _is_turned(image: "Image", data: bytes) -> bool:
    """Whether it lies on one of its sides. PNG may say so behind the picture: one that may is decoded."""
    from PIL import ExifTags

    if image.format == "TIFF" or (image.format == "PNG" and not any(name in data for name in _PNGS_TURNS)):
        return False  # Pillow has turned the size of a TIFF
    try:
        return image.getexif().get(ExifTags.Base.Orientation) in _ON_A_SIDE
    except Exception as error:  # noqa: BLE001  as above
        raise ImageRefused(f"it cannot be decoded: {short(str(error) or type(error).__name__)}") from None


def _final_size(height: int, width: int, rules: ImageRules) -> tuple[int, int]:
    try:
        return rules.final_size(height, width)
    except ValueError as error:
        raise ImageRefused(f"it has {error}") from None


def _opaque(image: "Image") -> "Image":
    """In red, green and blue; white shows through. Not a copy where that is so already: Pillow holds up all other
    threads while it copies, but not while it decodes."""
    from PIL import Image

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")
