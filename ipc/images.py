"""Images of a prompt on their way from the tokenizer to the workers.

Each of an image's tokens has an id of its own, from `IMAGE_IDS` on, which no vocabulary reaches. They are made of the
image's file, so equal ids mean equal images: caches of prefixes, routing and whatever else compares ids need not
know of images. To a model's embedding they are nothing; what the model's eye makes of the image is put there. Words
that some models have behind each row of an image are ordinary ones.
"""

import msgspec

IMAGE_IDS = 2**30
"""Token ids from here on, up to 2**31 - 1, stand for tokens of images."""


class PlacedImage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One image, and where its tokens are in the prompt."""

    first: int
    """Position of its first token."""
    num_tokens: int
    """They follow each other: row by row, from top to bottom. Of some models the last of each row is a word."""
    height: int
    """In pixels, as the model gets it."""
    width: int
    pixels: bytes
    """Red, green and blue, a byte each: height x width x 3. Empty towards workers that have all its tokens cached."""
