"""Pictures as Python programs have them (Pillow's, files, bytes, parts as OpenAI names them) to files as they travel.

Pillow is not imported: whoever has a picture of its has it. It knows no engine.
"""

import asyncio
import base64
import binascii
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from tercet.ipc.content import Content, ImagePart, Part, TextPart, as_content
from tercet.ipc.messages import ChatMessage

_AS_THEY_ARE = ("1", "L", "LA", "RGB", "RGBA")
"""Modes that a PNG holds as they are."""
_QUICKLY = 1
"""How hard a PNG is compressed: it does not travel far."""
_WANTED = (
    "want {'type': 'text', 'text': …}, {'type': 'image_url', 'image_url': {'url': …}} or {'type': 'image', 'image': …}"
)


class ImagePrompt(NamedTuple):
    """A text that keeps places for images, and their files."""

    text: str
    images: tuple[bytes, ...]


async def with_files(prompt: Any) -> Any:
    """The same prompt, its pictures as files. In a thread, where there are any. Raises `ValueError` and `TypeError`."""
    if not has_pictures(prompt):
        return prompt
    return await asyncio.to_thread(_with_files, prompt)


def has_pictures(prompt: Any) -> bool:
    """Whether any may have to become files. Quick."""
    if isinstance(prompt, Mapping):
        return True
    is_chat = isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], ChatMessage)
    return is_chat and any(map(_has_parts, prompt))


def bytes_of_data(url: str) -> bytes:
    """Of a data: URL of an image. Raises `ValueError`."""
    about, comma, data = url.partition(",")
    kind, *others = about[len("data:") :].split(";")
    if not comma or not kind.lower().startswith("image/") or "base64" not in others:
        raise ValueError(f"begins {about[:100]!r}; want data:image/png;base64,… or another kind of image")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"cannot be decoded: {error}; want base64") from None


def _has_parts(turn: Any) -> bool:
    """That are not as they travel yet."""
    content = turn.content if isinstance(turn, ChatMessage) else None
    return isinstance(content, list | tuple) and not all(isinstance(part, TextPart | ImagePart) for part in content)


def _with_files(prompt: Any) -> Any:
    if not isinstance(prompt, Mapping):
        return [msgspec.structs.replace(turn, content=_content(turn.content)) for turn in prompt]
    if not isinstance(text := prompt.get("prompt"), str) or set(prompt) - {"prompt", "multi_modal_data"}:
        raise ValueError(
            f"got a prompt with {', '.join(map(repr, prompt))}; want 'prompt', a text, and multi_modal_data"
        )
    given = prompt.get("multi_modal_data") or {}
    if not isinstance(given, Mapping) or set(given) - {"image"}:
        raise ValueError(f"multi_modal_data is {given!r:.100}; want {{'image': …}}, one or a list")
    images = given.get("image", [])
    return ImagePrompt(text, tuple(map(_file, images if isinstance(images, list | tuple) else [images])))


def _content(content: Any) -> Content:
    return as_content([_part(part) for part in content]) if isinstance(content, list | tuple) else content


def _part(part: Any) -> Part:
    match part:
        case TextPart() | ImagePart():
            return part
        case {"type": "text", "text": str(text), **others} if not others:
            return TextPart(text)
        case {"type": "image", "image": image, **others} if not others:
            return ImagePart(_file(image))
        case {"type": "image_url", "image_url": {"url": str(url), **more}, **others} if not others:
            if set(more) - {"detail"} or more.get("detail", "auto") != "auto":
                raise ValueError(f"image_url has {more!r:.100}; want url, and of detail auto or nothing")
            return ImagePart(_file(url))
    raise ValueError(f"content has {part!r:.100}; {_WANTED}")


def _file(image: Any) -> bytes:
    match image:
        case bytes() | bytearray() | memoryview():
            return bytes(image)
        case str():
            return _named(image)
        case os.PathLike():
            return Path(image).read_bytes()
    if hasattr(image, "save") and hasattr(image, "getbands"):
        return _png(image)
    raise TypeError(f"an image is {image!r:.100}; want Pillow's, bytes of a file, or where a file is")


def _named(where: str) -> bytes:
    scheme = where.partition(":")[0].lower()
    if scheme == "data":
        return bytes_of_data(where)
    if scheme in ("http", "https"):
        raise ValueError(f"an image is at {where[:100]!r}; want it here, as bytes or a file")
    return Path(unquote(urlsplit(where).path) if scheme == "file" else where).read_bytes()


def _png(image: Any) -> bytes:
    """As Pillow's picture is, sideways too: the engine turns it."""
    exif, file = image.getexif(), io.BytesIO()
    if image.mode not in _AS_THEY_ARE:
        is_clear = "A" in image.getbands() or image.info.get("transparency") is not None
        image = image.convert("RGBA" if is_clear else "RGB")
    image.save(file, "PNG", compress_level=_QUICKLY, exif=exif)
    return file.getvalue()
