"""A prompt's images, from the files that a client sent to the token ids and pixels that go on to a scheduler.

A prompt has one token for each image, which keeps its place; here it becomes as many as the image has. What is in a
file is `images.py`'s matter.
"""

import contextlib
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tercet.engine.config import EngineConfig
from tercet.engine.image_rules import ImageRules
from tercet.engine.images import ImageRefused, Pixels, has_pillow, image_ids, new_key, read_image, size_of
from tercet.engine.kept_images import KeptImages, name_of
from tercet.engine.refusal import Refusal
from tercet.ipc.images import PlacedImage
from tercet.ipc.images_in import images_in
from tercet.ipc.messages import Request

_NOT_BESIDE = ("prompt_logprobs", "truncate_prompt_tokens")
"""Tokens of images are no answer to anything, and half of an image is none."""
_READERS = 4
"""Of a prompt's images, each with a core of its own; Pillow holds nobody up while it decodes."""
Check = Callable[[int, int], None]
"""May refuse a prompt of so many tokens, of which so many are of images."""


class Placed(NamedTuple):
    """A prompt with its images."""

    told_ids: Sequence[int]
    """As clients know it: each token of an image is the one that kept its place."""
    prompt_ids: Sequence[int]
    """As schedulers do: they are an image's own."""
    images: tuple[PlacedImage, ...]


class ImageDesk:
    """Of one engine. Thread-safe."""

    def __init__(self, rules: ImageRules | None, config: EngineConfig) -> None:
        """`rules`: None where the model sees nothing, or is not to."""
        self._rules = rules
        self._most = config.num_images_per_prompt
        self._tries = config.speculative_config
        self._key = new_key()
        self._kept = KeptImages()
        self._readers = ThreadPoolExecutor(min(_READERS, len(os.sched_getaffinity(0))))

    def check(self, request: Request) -> None:
        """Refuse what brings more images than are served, or asks for what cannot be beside them. Quick."""
        if not (count := len(images_in(request))):
            return
        came = f"the prompt brings {count} image{'s' if count > 1 else ''}"
        if not self._most:
            text = "want text alone: the engine was started with --limit-mm-per-prompt for none"
            raise Refusal("not_supported", f"{came}; {text}")
        if self._rules is None and self._tries is not None and self._tries.method == "eagle3":
            text = "want text alone: images are not served beside --speculative-config of method eagle3"
            raise Refusal("not_supported", f"{came}; {text}")
        if self._rules is None:
            raise Refusal("not_supported", f"{came}; want text alone: images are not served with this model")
        if not has_pillow():
            text = "want Pillow where the engine runs: pip install 'tercet[images]'"
            raise Refusal("not_supported", f"{came}, which cannot be read; {text}")
        if count > self._most:
            raise Refusal("invalid_request", f"{came}; want at most {self._most} (--limit-mm-per-prompt)")
        for field in _NOT_BESIDE:
            if (value := getattr(request.params, field)) is not None:
                raise Refusal("not_supported", f"{field} is {value} beside images; want nothing, or text alone")

    def written(self, text: str, files: Sequence[bytes]) -> str:
        """A prompt's text as it becomes tokens: with what the model wants around images, if any come."""
        return text if self._rules is None or not files else self._rules.written(text)

    def tell(self, prompt_ids: Sequence[int], files: Sequence[bytes], salt: str, check: Check) -> Sequence[int]:
        """What the prompt will be said to be. No image is decoded for that. Raises `Refusal`."""
        if self._rules is None:
            return prompt_ids
        names = [name_of(file, salt) for file in files]
        return _expanded(prompt_ids, self._sizes(prompt_ids, files, names, self._rules), check, self._rules)

    def place(self, prompt_ids: Sequence[int], files: Sequence[bytes], salt: str, check: Check) -> Placed:
        """The same, and all that a scheduler gets of it."""
        if (rules := self._rules) is None:
            return Placed(prompt_ids, prompt_ids, ())
        names = [name_of(file, salt) for file in files]
        sizes = self._sizes(prompt_ids, files, names, rules)
        told = _expanded(prompt_ids, sizes, check, rules)
        if not files:
            return Placed(told, told, ())
        own, images, end = array("i", told), [], 0
        for name, pixels in zip(names, self._all_pixels(files, names, sizes, rules), strict=True):
            first = told.index(rules.token_id, end)
            tokens = rules.tokens(pixels.height, pixels.width)
            count = len(tokens)
            end, ids = first + count, image_ids(name, count, self._key)
            own[first:end] = array(
                "i", [new if token == rules.token_id else token for token, new in zip(tokens, ids, strict=True)]
            )
            images.append(PlacedImage(first, count, pixels.height, pixels.width, pixels.values))
        return Placed(told, own, tuple(images))

    def _all_pixels(
        self, files: Sequence[bytes], names: Sequence[bytes], sizes: Sequence[tuple[int, int]], rules: ImageRules
    ) -> list[Pixels]:
        """Those that are not kept are decoded beside each other, each once."""

        def pixels_of(place: int) -> Pixels:
            if (pixels := self._kept.find(names[place])) is None:
                with _blaming(place, files):
                    pixels = read_image(files[place], rules)
                    if (pixels.height, pixels.width) != sizes[place]:
                        raise ImageRefused("it begins as a file of another size")
                self._kept.keep(names[place], pixels)
            return pixels

        places = {name: names.index(name) for name in names}
        read = self._readers.map if len(places) > 1 else map
        by_name = dict(zip(places, read(pixels_of, places.values()), strict=True))
        return [by_name[name] for name in names]

    def _sizes(
        self, prompt_ids: Sequence[int], files: Sequence[bytes], names: Sequence[bytes], rules: ImageRules
    ) -> list[tuple[int, int]]:
        """Height and width of each image, of as many as the prompt has places for."""
        if (num_places := prompt_ids.count(rules.token_id)) != len(files):
            raise Refusal(
                "invalid_request",
                f"the prompt has places for {num_places} images (token {rules.token_id}), and {len(files)} came; want "
                "an image for each place",
            )
        sizes = []
        for place, (file, name) in enumerate(zip(files, names, strict=True)):
            kept = self._kept.find(name)
            with _blaming(place, files):
                sizes.append(size_of(file, rules) if kept is None else (kept.height, kept.width))
        return sizes


def _expanded(
    prompt_ids: Sequence[int], sizes: Sequence[tuple[int, int]], check: Check, rules: ImageRules
) -> Sequence[int]:
    """Each place as long as its image."""
    if not sizes:
        return prompt_ids
    images = [rules.tokens(*size) for size in sizes]
    count = sum(map(len, images))
    check(len(prompt_ids) - len(images) + count, count)
    told, begin = array("i"), 0
    for tokens in images:
        place = prompt_ids.index(rules.token_id, begin)
        told.extend(prompt_ids[begin:place])
        told.extend(tokens)
        begin = place + 1
    told.extend(prompt_ids[begin:])
    return told


@contextlib.contextmanager
def _blaming(place: int, files: Sequence[bytes]) -> Iterator[None]:
    """What is wrong with one is said of that one."""
    try:
        yield
    except ImageRefused as error:
        which = f"image {place + 1} of {len(files)}"
        raise Refusal("invalid_request", f"the prompt brings {which}, which cannot be used: {error}") from None
