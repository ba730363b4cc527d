"""Requests in slots whose prompts have images: what the model sees of them, chunk by chunk.

An image is encoded when the first chunk comes that has some of its tokens, and what was made of it is kept until the
chunk that has the last of them: the same one, where tokens of an image see each other. What layers read lies in fixed
memory, so that steps with images can be graphs. Knows on the host who has images; does nothing for a step without.

Shape suffixes: T tokens of the step, N tokens of an image, D hidden size, C chunks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tercet.ipc.images import PlacedImage
from tercet.ipc.step_messages import Step
from tercet.model.decoder import Decoder
from tercet.model.image_places import ImagePlace, ImagePlaces
from tercet.model.step_shape import StepShape
from tercet.model.vision import Seen, Vision
from tercet.model.vision_graphs import VisionGraphs
from tercet.triton_kernels.prepare import ImageEnds, ImageRows, StepInputs, TurnedTokens

_DTYPES = {"uint8": torch.uint8, "int32": torch.int32}


@dataclass
class _Prompt:
    """Of a request in a slot."""

    images: tuple[PlacedImage, ...]
    places: ImagePlaces
    seen: dict[int, Seen]
    """By image, of those of which a chunk has had some tokens and another is to have the rest."""


class _Chunk(NamedTuple):
    """One whose tokens are not turned as the slot table says."""

    prompt: _Prompt
    start: int
    stop: int
    """Positions."""
    first: int
    """Of its tokens, where the first is among those of all chunks."""


class ImageSlots:
    """Of one runner whose model sees."""

    def __init__(self, decoder: Decoder, vision: Vision, max_tokens: int, *, with_graphs: bool) -> None:
        """`max_tokens`: of the longest step; `with_graphs`: images of sizes that come again are encoded by graphs."""
        self._decoder = decoder
        self._config = vision.config
        self._encode = VisionGraphs(vision).encode if with_graphs else vision.encode
        self._prompts: dict[int, _Prompt] = {}
        """By slot."""
        room, embedding_VD = (max_tokens, decoder.config.hidden_size), decoder.weights.embedding_VD
        stream_TD, *deep = (embedding_VD.new_empty(room) for _ in (0, *vision.config.deep_layers))
        self._rows = ImageRows(stream_TD, tuple(deep))
        self._turns_T3 = torch.zeros(max_tokens, 3, dtype=torch.int32, device=embedding_VD.device)
        self._places_T = self._on_device(np.arange(max_tokens, dtype=np.int32))
        self._ends_T = torch.zeros(max_tokens, dtype=torch.int32, device=embedding_VD.device)

    def note(self, step: Step) -> dict[int, int]:
        """Who leaves and who comes. Returns `SlotTable.shift_S` of those who come with images that shift."""
        for slot in np.frombuffer(step.leave, np.int32).tolist():
            self._prompts.pop(slot, None)
        shifts = {}
        for enter in step.enter:
            self._prompts.pop(enter.slot, None)
            if enter.images:
                places = ImagePlaces([self._place(image) for image in enter.images])
                self._prompts[enter.slot] = _Prompt(enter.images, places, {})
                if self._decoder.turns_by_axes:
                    shifts[enter.slot] = places.shift
        return shifts

    def are_among(self, chunks_3C: NDArray[np.int32]) -> bool:
        """Whether some chunk begins ahead of where its prompt's last image ends."""
        return bool(self._prompts) and any(True for _ in self._with_images(chunks_3C))

    def prepare(self, shape: StepShape, chunks_3C: NDArray[np.int32]) -> None:
        """Ahead of a step of this shape with such chunks: images of which these are the first tokens are encoded."""
        turns_T3 = np.full((shape.num_decodes + shape.num_prefill_tokens, 3), -1, np.int32)
        ends_T = np.zeros(shape.num_prefill_tokens, np.int32)
        for prompt, start, stop, first in self._with_images(chunks_3C):
            ahead = shape.num_decodes + first - start  # of a position, where its token is in the step
            turns_T3[ahead + start : ahead + stop] = prompt.places.turns(start, stop)
            for image, begin, end in prompt.places.overlaps(start, stop):
                place, seen = prompt.places.places[image], self._see(prompt, image)
                pairs = zip((self._rows.stream_TD, *self._rows.deep), (seen.rows_NO, *seen.deep), strict=True)
                for into_TD, made_ND in pairs:
                    into_TD[ahead + begin : ahead + end].copy_(made_ND[begin - place.first : end - place.first])
                ends_T[first - start + begin : first - start + end] = place.stop
                if end == place.stop:
                    del prompt.seen[image]
                else:
                    assert not self._config.both_ways, f"a chunk ends at {end}, within {place}"
        if self._decoder.turns_by_axes:
            self._turns_T3[: len(turns_T3)].copy_(self._on_device(turns_T3))
        if self._config.both_ways:
            self._ends_T[: len(ends_T)].copy_(self._on_device(ends_T))

    def attach(self, inputs: StepInputs) -> StepInputs:
        """What layers read in that step. Graph-safe."""
        T = len(inputs.input_ids_T)
        stream_TD, deep = self._rows
        rows = ImageRows(stream_TD[:T], tuple(rows_TD[:T] for rows_TD in deep))
        if self._config.both_ways:
            num_decodes = len(inputs.decode_slots_B) * inputs.tries
            ends = ImageEnds(self._ends_T[: T - num_decodes], self._config.in_windows)
            return replace(inputs, image_rows=rows, ends=ends)
        if not self._decoder.turns_by_axes:
            return replace(inputs, image_rows=rows)
        turns_TR = self._decoder.turns(inputs.positions_T, self._turns_T3[:T])
        return replace(inputs, image_rows=rows, turned=TurnedTokens(self._places_T[:T], turns_TR))

    def _with_images(self, chunks_3C: NDArray[np.int32]) -> Iterator[_Chunk]:
        first = 0
        for slot, start, length in chunks_3C.T.tolist():
            prompt = self._prompts.get(slot)
            if prompt is not None and start < prompt.places.stop:
                yield _Chunk(prompt, start, start + length, first)
            first += length

    def _place(self, image: PlacedImage) -> ImagePlace:
        side, breaks = self._config.side, self._config.breaks
        place = ImagePlace(image.first, image.height // side, image.width // side + breaks)
        if place.rows * place.columns != image.num_tokens:
            got = f"an image of {image.height} by {image.width} pixels with {image.num_tokens} tokens"
            each = f"one for {side} by {side} pixels{' and one for each row of those' if breaks else ''}"
            raise ValueError(f"got {got}, wanted {place.rows * place.columns}, {each}")
        return place

    def _see(self, prompt: _Prompt, index: int) -> Seen:
        if index not in prompt.seen:
            image = prompt.images[index]
            pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)
            prompt.seen[index] = self._encode(self._on_device(pixels))
        return prompt.seen[index]

    def _on_device(self, numbers: NDArray[Any]) -> Tensor:
        device = self._decoder.group.device
        host = torch.empty(numbers.shape, dtype=_DTYPES[numbers.dtype.name], pin_memory=device.type == "cuda")
        host.numpy()[:] = numbers
        return host.to(device, non_blocking=True)
