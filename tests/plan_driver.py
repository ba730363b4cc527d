"""Drives a runner by hand, as a scheduler would: random chunks, leases, pages in random order, slots used again.

Requests with a grammar have random masks, of which some are there when a step is planned, some before its draw, and
some later.
"""

import random
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tercet.ipc.images import PlacedImage
from tercet.ipc.mask_table import create_mask_table, map_mask_table, num_mask_words
from tercet.ipc.step_messages import Adjustments, Draw, Enter, Sampling, Step
from tercet.model.runner import Runner

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=16, min_tokens=0, stop_ids=b"")


def pack(*numbers: int) -> bytes:
    return array("i", numbers).tobytes()


@dataclass
class Job:
    """One request: how far it is, and what it got. A preempted one brings earlier output as part of its prompt."""

    prompt: list[int]
    sampling: Sampling
    num_prompt: int = -1
    slot: int = -1
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    done: bool = False
    images: tuple[PlacedImage, ...] = ()

    def __post_init__(self) -> None:
        self.num_prompt = len(self.prompt)

    def take(self, token: int) -> None:
        """A token from the runner; -1 once the request is done, and never before."""
        if self.done:
            assert token == -1
            return
        assert token >= 0
        self.output.append(token)
        stop_ids = array("i", self.sampling.stop_ids)
        generated = len(self.prompt) - self.num_prompt + len(self.output)
        stopped = token in stop_ids and generated > self.sampling.min_tokens
        self.done = stopped or generated >= self.sampling.max_tokens


class RandomMasks:
    """A table of masks, a row for each slot. What a mask allows follows from the request's seed and the position."""

    def __init__(self, path: Path, num_slots: int, vocab_size: int) -> None:
        self._path, self._vocab_size = path, vocab_size
        create_mask_table(path, num_slots, vocab_size)
        self._table = map_mask_table(path, vocab_size, writable=True)

    def write(self, jobs: list[Job]) -> tuple[bytes, str]:
        """Masks of the next tokens of these, as messages name them. The table's rows stand the other way round."""
        last = len(self._table) - 1
        for job in jobs:
            self._table[last - job.slot] = self.mask_of(job)
        return pack(*(word for job in jobs for word in (job.slot, last - job.slot))), str(self._path) if jobs else ""

    def allows(self, job: Job, token_id: int) -> bool:
        return bool(self.mask_of(job)[token_id // 32] >> (token_id % 32) & 1)

    def mask_of(self, job: Job) -> NDArray[np.int32]:
        rng = np.random.default_rng([job.sampling.seed, len(job.prompt) + len(job.output)])
        words = rng.integers(-(2**31), 2**31, (4, num_mask_words(self._vocab_size)), np.int32)
        words[0, rng.integers(self._vocab_size // 32)] = words[1:, -1] = -1  # some token is allowed
        mask: NDArray[np.int32] = np.bitwise_and.reduce(words)
        return mask


def masked_jobs(prompts: list[list[int]]) -> list[Job]:
    """Half of them have a grammar, and penalties or log-probabilities some of those."""
    return [
        Job(
            prompt,
            Sampling(
                (0.0, 1.0)[i % 2], (0, 20)[i // 2 % 2], 1.0, 0.0, i, 20, 0, b"",
                adjustments=Adjustments(1.2) if i % 3 == 0 else None,
                logprobs=1 if i % 5 == 0 else None,
                grammar="a grammar" if i % 4 < 2 else None,
            ),
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


def run_jobs(
    runner: Runner,
    jobs: list[Job],
    *,
    max_seqs: int,
    page_size: int,
    seed: int,
    budget: int = 40,
    max_lease: int = 4,
    masks: RandomMasks | None = None,
    ahead: bool = False,
    num_guesses: int = 0,
    tile: int = 1,
) -> None:
    """Run every job to its end; slots and pages are drawn at random and used again.

    `ahead`: steps that have no prompts are planned ahead of some of their `masks`; `num_guesses`: in most of those that
    have no masks either so many tokens are tried; `tile`: chunks begin at multiples of it.
    """
    rng = random.Random(seed)
    free_pages = list(range(1, runner.limits.num_pages))
    free_slots = list(range(max_seqs))
    waiting, running = list(jobs), list[Job]()
    step_id = 0
    leave: list[int] = []
    while waiting or running:
        enter: list[Enter] = []
        while waiting and free_slots and rng.random() < 0.7:
            job = waiting.pop(0)
            job.slot = free_slots.pop(rng.randrange(len(free_slots)))
            enter.append(Enter(job.slot, pack(*job.prompt), job.num_prompt, job.sampling, images=job.images))
            running.append(job)
        chunks: list[int] = []
        room = budget
        decodes = [job for job in running if job.computed >= len(job.prompt) and rng.random() < 0.9]
        chunked = [job for job in running if job.computed < len(job.prompt)]
        rng.shuffle(decodes)
        lengths: dict[int, int] = {}
        for job in chunked:
            rest = len(job.prompt) - job.computed
            length = min(rest, tile * rng.randint(1, 20), room)
            length -= length % tile if length < rest else 0
            if runner.limits.image_tokens:
                length = _beside_images(job, length, room)
            if length:
                chunks += [job.slot, job.computed, length]
                lengths[id(job)] = length
                room -= length
        chunked = [job for job in chunked if id(job) in lengths]
        sampling = [*decodes, *(job for job in chunked if job.computed + lengths[id(job)] >= len(job.prompt))]
        masked = [job for job in sampling if job.sampling.grammar is not None]
        count = 1 if chunks or masked else rng.randint(1, max_lease)
        awaited = [job for job in masked if ahead and not chunks and rng.random() < 0.7]
        late = [job for job in awaited if rng.random() < 0.3]
        here = [job for job in masked if job not in awaited]
        guesses = num_guesses if decodes and not (chunks or masked) and rng.random() < 0.8 else 0
        pages: list[int] = []
        for job in (*decodes, *chunked):
            most = job.num_prompt + job.sampling.max_tokens - 1
            reach = min(job.computed + lengths.get(id(job), count * (1 + guesses)), most)
            while len(job.pages) * page_size < reach:
                page = free_pages.pop(rng.randrange(len(free_pages)))
                pages += [job.slot, len(job.pages), page]
                job.pages.append(page)
        runner.begin(
            Step(
                step_id,
                count,
                pack(*leave),
                tuple(enter),
                pack(*pages),
                pack(*chunks),
                pack(*(job.slot for job in decodes)),
                0,
                *(masks.write(here) if masks else (b"", "")),
                longest=max((job.computed + 1 for job in decodes), default=0),
                awaits=bool(awaited),
                num_guesses=guesses,
            )
        )
        if not awaited:
            landings = [runner.launch(index) for index in range(count)]
        else:
            assert masks is not None
            midway = runner.launch_model()
            if rng.random() < 0.5:
                midway.wait()
            come = [job for job in awaited if job not in late]
            rows = pack(*(row for row, job in enumerate(decodes) if job in late))
            early = [job for job in come if rng.random() < 0.3]
            if early:
                assert runner.draw(Draw(step_id, 0, *masks.write(early), b"", more_come=True)) is None
            last = runner.draw(Draw(step_id, 0, *masks.write([job for job in come if job not in early]), rows))
            assert last is not None
            landings = [last]
        for landing in landings:
            tokens = landing.wait().tolist()
            if guesses:
                _take_trials(decodes, tokens, 1 + guesses)
                continue
            assert len(tokens) == len(decodes) + len(chunked)
            for job, token in zip([*decodes, *chunked], tokens, strict=True):
                assert masks is None or job not in masked or job in late or masks.allows(job, token)
            for job, token in zip(decodes, tokens, strict=False):
                if job in late:
                    assert token == -1
                    continue
                job.take(token)
                job.computed += token >= 0
            for job, token in zip(chunked, tokens[len(decodes) :], strict=True):
                job.computed += lengths[id(job)]
                if job.computed < len(job.prompt):
                    assert token == -1
                else:
                    job.take(token)
        leave = []
        for job in [job for job in running if job.done]:
            running.remove(job)
            leave.append(job.slot)
            free_slots.append(job.slot)
            free_pages += job.pages
        step_id += 1


def _beside_images(job: Job, length: int, room: int) -> int:
    """Up to an image that so many tokens would cut, or to its end; 0 where there is no room for that."""
    end = job.computed + length
    for image in job.images:
        if image.first < end < image.first + image.num_tokens:
            end = image.first if image.first > job.computed else image.first + image.num_tokens
    return end - job.computed if end - job.computed <= room else 0


def _take_trials(decodes: list[Job], tokens: list[int], width: int) -> None:
    """What a step has sampled that tried several tokens of each job: those that hold are the first."""
    assert len(tokens) == len(decodes) * width
    for row, job in enumerate(decodes):
        mine = tokens[row * width : (row + 1) * width]
        kept = [token for token in mine if token >= 0]
        assert mine[: len(kept)] == kept
        assert set(mine[len(kept) :]) <= {-1, -2}
        assert bool(kept) != job.done
        for token in kept:
            job.take(token)
        job.computed += len(kept)
