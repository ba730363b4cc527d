"""What a turn of a conversation says where that is more than a text: pieces of text, and images, in order.

It knows shapes: whether bytes are an image is found out where they become pixels (`engine/images.py`).
"""

from collections.abc import Sequence

import msgspec


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A piece of text."""

    text: str


class ImagePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image"):
    """A picture."""

    data: bytes
    """A whole file, as PNG or JPEG; of one that moves, the first picture counts."""


Part = TextPart | ImagePart
Content = str | tuple[Part, ...] | None


def as_content(parts: Sequence[Part]) -> str | tuple[Part, ...]:
    """A text where there is nothing else: templates need not know of parts then."""
    if any(isinstance(part, ImagePart) for part in parts):
        return tuple(parts)
    return text_of(tuple(parts))


def text_of(content: Content) -> str:
    """All that is text in it."""
    if isinstance(content, tuple):
        return "".join(part.text for part in content if isinstance(part, TextPart))
    return content or ""


def images_of(content: Content) -> tuple[bytes, ...]:
    """All that is none."""
    return tuple(part.data for part in content if isinstance(part, ImagePart)) if isinstance(content, tuple) else ()
