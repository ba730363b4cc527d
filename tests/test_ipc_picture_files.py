"""Pictures as Python programs have them, and what is made of each: files that the engine sees as they were meant."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from image_processors import as_transformers
from seeing import encoded, picture
from tercet.engine.image_rules import ImageRules
from tercet.engine.image_sizes import PixelBounds
from tercet.engine.images import read_image
from tercet.ipc.content import ImagePart, TextPart
from tercet.ipc.messages import Chat, ChatMessage, Generate
from tercet.ipc.picture_files import with_files
from tercet.ipc.prompt import make_request

RULES = ImageRules(7, 14, 2, PixelBounds(56 * 56, 28 * 28 * 64))
FILE = encoded(picture(40, 30))
DATA = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"


async def content_of(*parts: Any) -> Any:
    turn: Any = ChatMessage("user", tuple(parts))
    request = make_request(await with_files([turn]))
    assert isinstance(request, Chat)
    return request.messages[0].content


async def file_of(image: Any) -> bytes:
    (part,) = await content_of({"type": "image", "image": image})
    assert isinstance(part, ImagePart)
    return part.data


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16", "CMYK", "HSV", "F", "I", "PA", "RGBa"])
async def test_pillow_s_own(mode: str) -> None:
    image = picture(90, 61).convert("F").convert("I") if mode == "I" else picture(90, 61, mode)
    wanted = as_transformers(image, RULES)
    ours = read_image(await file_of(image), RULES)
    assert (np.frombuffer(ours.values, np.uint8).reshape(wanted.shape) == wanted).all()


async def test_pillow_s_own_taken_sideways() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for mode in ("RGB", "CMYK"):
        image = Image.open(io.BytesIO(encoded(picture(90, 50, mode), "JPEG", exif=exif)))
        wanted = as_transformers(ImageOps.exif_transpose(image), RULES)
        ours = read_image(await file_of(image), RULES)
        assert (np.frombuffer(ours.values, np.uint8).reshape(wanted.shape) == wanted).all()


async def test_places_of_files(tmp_path: Path) -> None:
    (tmp_path / "a b.png").write_bytes(FILE)
    path = tmp_path / "a b.png"
    for one in (FILE, bytearray(FILE), path, str(path), path.as_uri(), DATA):
        assert await file_of(one) == FILE
    for url in (DATA, path.as_uri(), str(path)):
        parts = await content_of({"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}})
        assert parts == (TextPart("see"), ImagePart(FILE))


async def test_texts_that_keep_places() -> None:
    for given in (FILE, [FILE, picture(30, 30)], ()):
        request = make_request(await with_files({"prompt": "x", "multi_modal_data": {"image": given}}))
        assert isinstance(request, Generate)
        assert (request.prompt, len(request.images)) == ("x", len(given) if isinstance(given, list | tuple) else 1)
    assert make_request(await with_files({"prompt": "x"})) == Generate("", "x")


async def test_other_prompts_are_as_they_are() -> None:
    turns = [ChatMessage("user", "x"), ChatMessage("user", (TextPart("y"), ImagePart(FILE)))]
    for prompt in ("x", [1, 2], turns, [], ()):
        assert await with_files(prompt) is prompt
    assert await content_of({"type": "text", "text": "a"}, TextPart("b")) == "ab"


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("see", "content has 'see'; want {'type': 'text'"),
        ({"type": "text"}, "want {'type': 'text', 'text'"),
        ({"type": "video", "video": "x.mp4"}, "content has .*x.mp4"),
        ({"type": "image", "image": 5}, "an image is 5; want Pillow's, bytes of a file, or where a file is"),
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "want it here, as bytes or a file"),
        ({"type": "image_url", "image_url": {"url": DATA, "detail": "low"}}, "of detail auto or nothing"),
        ({"type": "image_url", "image_url": {"url": "data:text/html,x"}}, "want data:image/png;base64"),
        ({"type": "image", "image": "/no/such.png"}, "No such file"),
    ],
)
async def test_what_is_no_part(part: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=words):
        await content_of(part)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({}, "want 'prompt', a text, and multi_modal_data"),
        ({"prompt": "x", "images": []}, "'prompt', 'images'; want"),
        ({"prompt": "x", "multi_modal_data": {"video": []}}, "want {'image': …}"),
        ({"prompt": "x", "multi_modal_data": [FILE]}, "want {'image': …}"),
    ],
)
async def test_what_is_no_prompt(prompt: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        await with_files(prompt)
