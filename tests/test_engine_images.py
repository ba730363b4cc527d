"""Files of images to pixels: to the bit as transformers' image processor has them, and nothing that comes may harm."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as smart_resize_of_glm
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
    get_optimal_tiled_canvas,
)
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from image_processors import as_transformers
from seeing import encoded, picture
from tercet.engine.image_breaks import Breaks
from tercet.engine.image_rules import ImageRules
from tercet.engine.image_sizes import OneSize, PixelBounds, SideBounds, Tiles
from tercet.engine.images import ImageRefused, Pixels, image_ids, read_image, size_of
from tercet.engine.kept_images import name_of
from tercet.ipc.images import IMAGE_IDS

RULES = ImageRules(7, 14, 2, PixelBounds(56 * 56, 28 * 28 * 64))
WIDE = ImageRules(7, 16, 2, PixelBounds(64 * 64, 32 * 32 * 40))
GLM = ImageRules(7, 14, 2, PixelBounds(12544, 200_000, 2, enlarges=True))
PIXTRAL = ImageRules(7, 14, 2, SideBounds(112, 112), breaks=Breaks(8, 9))
GEMMA = ImageRules(7, 14, 2, OneSize(112, 112), 2)
INTERNVL = ImageRules(7, 14, 2, Tiles(56, 1, 12))


def check(file: bytes, rules: ImageRules = RULES) -> Pixels:
    ours = read_image(file, rules)
    wanted = as_transformers(ImageOps.exif_transpose(Image.open(io.BytesIO(file))), rules)  # as `load_image` turns
    assert (ours.height, ours.width, 3) == wanted.shape
    assert size_of(file, rules) == (ours.height, ours.width)
    assert (np.frombuffer(ours.values, np.uint8).reshape(wanted.shape) == wanted).all()
    return ours


def test_sizes() -> None:
    random = np.random.default_rng(0)
    for rules in (RULES, WIDE):
        for _ in range(3000):
            height, width = (int(2 ** random.uniform(0, 13)) for _ in range(2))
            assert isinstance(rules.sizes, PixelBounds)
            try:
                wanted = smart_resize(height, width, rules.factor, rules.sizes.least, rules.sizes.most)
            except ValueError:
                with pytest.raises(ValueError, match="want sides"):
                    rules.final_size(height, width)
            else:
                assert rules.final_size(height, width) == wanted


def test_sizes_of_pictures_that_count_as_films() -> None:
    random = np.random.default_rng(0)
    for least, most in ((12544, 200_000), (12545, 9633791), (1, 9633792)):
        rules = ImageRules(7, 14, 2, PixelBounds(least, most, 2, enlarges=True))
        for _ in range(2000):
            height, width = (int(2 ** random.uniform(0, 13)) for _ in range(2))
            try:
                wanted = smart_resize_of_glm(2, height, width, 2, rules.factor, least, most)
            except ValueError:
                with pytest.raises(ValueError, match=f"{width} x {height} pixels; want sides"):
                    rules.final_size(height, width)
            else:
                assert rules.final_size(height, width) == wanted
                assert most < 10**6 or wanted[0] // 28 * (wanted[1] // 28) <= rules.most_seen


def test_sizes_of_bounded_sides() -> None:
    random = np.random.default_rng(0)
    for rules in (PIXTRAL, ImageRules(7, 14, 2, SideBounds(1540, 1540)), ImageRules(7, 16, 1, SideBounds(40, 300))):
        assert isinstance(rules.sizes, SideBounds)
        bounds, unit = (rules.sizes.height, rules.sizes.width), rules.factor
        for _ in range(300):
            height, width = (int(2 ** random.uniform(0, 13)) for _ in range(2))
            wanted = get_resize_output_image_size(np.empty((3, height, width), np.uint8), bounds, unit)
            if min(wanted) < unit:
                with pytest.raises(ValueError, match="want sides"):
                    rules.final_size(height, width)
                continue
            assert rules.final_size(height, width) == wanted
            assert wanted[0] // unit * (wanted[1] // unit) <= rules.most_seen


@pytest.mark.parametrize(("least", "most"), [(1, 12), (1, 1), (3, 5), (1, 40)])
def test_tiles(least: int, most: int) -> None:
    """Of small images and large ones, of shapes that have several grids, and of those between two."""
    random, tiles = np.random.default_rng(0), Tiles(56, least, most)
    theirs = GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}, min_patches=least, max_patches=most)
    sizes = [tuple(int(2 ** random.uniform(0, 12)) for _ in range(2)) for _ in range(200)]
    sizes += [
        (rows * scale, columns * scale) for rows in (1, 2, 3, 5) for columns in (1, 2, 3) for scale in (30, 60, 99)
    ]
    for height, width in sizes:
        columns, rows = tiles.grid(height, width)
        assert (columns, rows) == get_optimal_tiled_canvas((height, width), (56, 56), least, most)
        count = theirs.get_number_of_image_patches(height, width, {"crop_to_patches": True})
        assert tiles.final_size(height, width, 28) == (56 * count, 56)
        assert 4 * count <= tiles.most_tokens(28)


def test_tokens() -> None:
    assert RULES.tokens(56, 84).tolist() == [7] * 6
    assert PIXTRAL.tokens(56, 84).tolist() == [7, 7, 7, 8, 7, 7, 7, 9]
    assert PIXTRAL.tokens(84, 28).tolist() == [7, 8, 7, 8, 7, 9]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
def test_modes(mode: str) -> None:
    for seed, size in enumerate([(97, 61), (56, 84), (3, 200)]):
        file = encoded(picture(*size, mode, seed))
        check(file, WIDE if seed % 2 else RULES)
        check(file, PIXTRAL)
        check(file, GEMMA)
        check(file, GLM)
        check(file, INTERNVL)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("JPEG", "RGB"), ("JPEG", "CMYK"), ("JPEG", "L"), ("WEBP", "RGBA"), ("GIF", "P"), ("BMP", "RGB"), ("TIFF", "RGB")],
)
def test_kinds_of_files(kind: str, mode: str) -> None:
    check(encoded(picture(120, 75, mode), kind))


@pytest.mark.parametrize("turn", [1, 3, 6, 8])
def test_pictures_that_were_taken_sideways(turn: int) -> None:
    for kind in ("JPEG", "PNG", "TIFF", "WEBP", "AVIF"):
        exif = Image.Exif()
        exif[0x0112] = turn
        file = encoded(picture(150, 60), kind, exif=exif)
        for rules in (RULES, PIXTRAL):
            pixels = check(file, rules)
            assert (pixels.height > pixels.width) == (turn in (6, 8))
        check(file, INTERNVL)


def test_what_is_transparent_is_white() -> None:
    clear = encoded(Image.new("RGBA", (60, 60), (200, 0, 0, 0)))
    assert set(check(clear).values) == {255}
    palette = Image.new("P", (60, 60), 1)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    assert set(check(encoded(palette, transparency=1)).values) == {255}


def test_of_what_moves_the_first_picture_counts() -> None:
    first, *more = (picture(64, 64, "RGB", seed) for seed in range(3))
    for kind in ("GIF", "WEBP", "PNG"):
        options = {"lossless": True} if kind == "WEBP" else {}
        moving = read_image(encoded(first, kind, save_all=True, append_images=more, **options), RULES)
        assert moving == read_image(encoded(first, kind, **options), RULES)


def test_a_png_that_says_behind_the_picture_how_it_is_turned() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = encoded(picture(150, 60), exif=exif)
    begin = file.index(b"eXIf") - 4
    end = begin + 12 + int.from_bytes(file[begin : begin + 4], "big")
    last = len(file) - 12
    late = file[:begin] + file[end:last] + file[begin:end] + file[last:]
    assert check(late, PIXTRAL) == check(file, PIXTRAL)


def test_what_is_too_thin_for_bounded_sides() -> None:
    for size in ((500, 1), (1, 500), (1, 113)):
        with pytest.raises(ImageRefused, match="pixels; want sides of which none is more than 112 times the other"):
            read_image(encoded(picture(*size)), PIXTRAL)
    check(encoded(picture(112, 1)), PIXTRAL)


def huge_png(width: int, height: int) -> bytes:
    """A file of a few bytes that says that it is large."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (b"", "0 bytes that are no image; want a file of PNG, JPEG"),
        (b"<svg></svg>", "no image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image"),
        (encoded(picture(50, 50))[:300], "cannot be decoded"),
        (encoded(picture(90, 90), "JPEG")[:900], "cannot be decoded"),
        (encoded(picture(300, 1)), "300 x 1 pixels; want sides of which none is more than 200 times"),
        (huge_png(10_000, 10_000), "10000 x 10000 pixels; want at most 67108864"),
        (huge_png(60_000, 60_000), "too many pixels; want at most 67108864"),
        (huge_png(0, 5), "no image|0 x 5"),
    ],
)
def test_what_cannot_be_used(file: bytes, words: str) -> None:
    with pytest.raises(ImageRefused, match=words):
        read_image(file, RULES)


def test_files_with_errors_in_them_harm_nobody() -> None:
    random = np.random.default_rng(5)
    kinds = [encoded(picture(40, 40), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")]
    for number in range(240):
        file = bytearray(kinds[number % len(kinds)])
        for place in random.integers(0, len(file), 4):
            file[place] = random.integers(0, 256)
        try:
            pixels = read_image(bytes(file), RULES)
        except ImageRefused:
            continue
        assert len(pixels.values) == pixels.height * pixels.width * 3


def test_ids_are_of_the_file() -> None:
    name, key = name_of(encoded(picture(84, 56)), ""), b"k" * 32
    ids = image_ids(name, 6, key)
    assert len(set(ids)) == 6
    assert all(IMAGE_IDS <= token_id < 2**31 for token_id in ids)
    assert image_ids(name_of(encoded(picture(84, 56)), ""), 6, key) == ids
    others = [name_of(encoded(picture(84, 56, seed=1)), ""), name_of(encoded(picture(84, 56)), "a salt")]
    for other in (*(image_ids(one, 6, key) for one in others), image_ids(name, 6, b"K" * 32)):
        assert not set(other) & set(ids)
