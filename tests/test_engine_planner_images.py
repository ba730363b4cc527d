"""The planner where tokens of an image see each other: all that one computes of an image it computes at once.

The worker is the simulated one, which looks at chunks, too.
"""

import random

import numpy as np
import pytest
from msgspec.structs import replace

from simulated_worker import VOCABULARY, SimulatedWorker, undisturbed
from tercet.engine.planner_settings import PlannerSettings
from tercet.ipc.images import IMAGE_IDS, PlacedImage
from tercet.ipc.step_messages import Abort, Step, Submit
from test_engine_planner import Run, random_speculation, settings, submit

IMAGE = 8
"""Tokens of each."""


class ImageWorker(SimulatedWorker):
    """Refuses chunks that end within an image, and images that it has to look at and cannot."""

    def __init__(self, chosen: PlannerSettings) -> None:
        super().__init__(chosen.max_num_seqs, chosen.num_pages, chosen.page_size, chosen.max_num_batched_tokens)
        self._images: dict[int, tuple[PlacedImage, ...]] = {}

    def issue(self, step: Step) -> None:
        self._images |= {enter.slot: enter.images for enter in step.enter}
        for slot, start, length in np.frombuffer(step.chunks, np.int32).reshape(-1, 3).tolist():
            for image in self._images[slot]:
                first, stop = image.first, image.first + image.num_tokens
                assert not first < start + length < stop, f"{start} to {start + length} cuts {first} to {stop}"
                assert image.pixels or start + length <= first or stop <= start
        super().issue(step)


def begin(**changes: object) -> Run:
    chosen = settings(**{"image_tokens": IMAGE, "max_num_batched_tokens": 21, "num_pages": 100, **changes})
    run = Run(chosen)
    run.worker = ImageWorker(chosen)
    return run


def showing(number: int, parts: list[list[int] | int], **sampling: object) -> Submit:
    """Words, and images by their numbers."""
    prompt: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            images.append(PlacedImage(len(prompt), IMAGE, 2, 4, bytes([part]) * 24))
            part = [IMAGE_IDS + part * IMAGE + token for token in range(IMAGE)]
        prompt += part
    return replace(submit(number, prompt, **sampling), images=tuple(images))  # type: ignore[arg-type]


def chunks(run: Run) -> list[tuple[int, int]]:
    """Of the next plan: first position and length."""
    step = run.planner.plan(0.0)
    assert step is not None
    run.worker.issue(step)
    return [(start, length) for _, start, length in np.frombuffer(step.chunks, np.int32).reshape(-1, 3).tolist()]


def test_chunks_end_beside_images() -> None:
    run = begin()
    run.planner.submit(showing(1, [[1] * 5, 1, [2] * 3, 2, 3, [4] * 20]), 0.0)
    planned = [chunks(run)]
    for _ in range(2):
        run.execute()
        planned.append(chunks(run))
    assert planned == [[(0, 16)], [(16, 21)], [(37, 15)]]
    run.finish()


def test_who_has_half_of_a_step_gets_a_whole_image() -> None:
    run = begin(max_num_batched_tokens=14)
    run.planner.submit(showing(1, [1, [1] * 6, 2, [2] * 20]), 0.0)
    run.planner.submit(submit(2, [3] * 6), 0.0)
    assert chunks(run) == [(0, 8), (0, 6)]
    run.execute()
    assert chunks(run) == [(8, 6)]
    run.finish()


def test_nobody_begins_without_room_for_an_image() -> None:
    run = begin(max_num_batched_tokens=14)
    run.planner.submit(submit(1, [3] * 7), 0.0)
    run.planner.submit(showing(2, [1, [1] * 3]), 0.0)
    assert chunks(run) == [(0, 7)]
    run.execute()
    assert chunks(run) == [(0, 11)]
    run.finish()


def test_the_rest_of_an_image_behind_cached_pages_is_computed_at_once() -> None:
    run = begin(max_num_batched_tokens=10)
    run.planner.submit(showing(1, [[1] * 3, 1, [2] * 3]), 0.0)
    run.finish()
    run.planner.submit(showing(2, [[1] * 3, 1, 2, [2] * 3]), 0.0)
    assert chunks(run) == [(8, 3)]  # two pages are cached: three tokens of the image are not
    run.finish()
    assert run.ended[2].usage.num_cached_tokens == 8


@pytest.mark.parametrize("seed", range(12))
def test_random_loads_with_images_say_what_undisturbed_requests_say(seed: int) -> None:
    draw = random.Random(seed)
    num_seqs = draw.choice([1, 3, 8])
    run = begin(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs + IMAGE + draw.choice([0, 0, 3, 11, 40]),
        num_pages=draw.choice([32, 36, 60]),
        page_size=draw.choice([2, 4]),
        max_model_len=60,
        enable_prefix_caching=draw.random() < 0.8,
        deterministic=draw.random() < 0.4,
        speculation=draw.choice([None, random_speculation(draw)]),
    )

    def random_parts() -> list[list[int] | int]:
        parts = [draw.choice([draw.randrange(3), [draw.randrange(2)] * draw.randint(1, 6)]) for _ in range(4)]
        return [*parts, [draw.randrange(VOCABULARY)] * draw.randint(1, 3)]

    stems, requests, aborted = [random_parts() for _ in range(3)], dict[int, Submit](), set[int]()
    for number in range(25):
        parts = [*draw.choice(stems)[: draw.randint(1, 4)], *draw.choice([[], [[5]], [2, [6]]])]
        requests[number] = showing(number, parts, max_tokens=draw.randint(1, 12), seed=draw.randrange(3))
    waiting = list(requests.values())
    while waiting or not run.planner.idle:
        if waiting and draw.random() < 0.4:
            assert run.planner.submit(waiting.pop(), 0.0) is None
        elif draw.random() < 0.03:
            aborted.add(number := draw.randrange(len(requests)))
            run.planner.abort(Abort(np.array([number], np.int64).tobytes()))
        elif not run.plan() and run.worker.in_flight:
            run.execute()
    for number, message in requests.items():
        wanted = undisturbed(np.frombuffer(message.prompt_ids, np.int32).tolist(), message.sampling)
        assert run.said[number] == (wanted[: len(run.said[number])] if number in aborted else wanted)
