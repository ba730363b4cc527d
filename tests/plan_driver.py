"""Drives a runner by hand, as a scheduler would: random chunks, leases, pages in random order, slots used again."""

import random
from array import array
from dataclasses import dataclass, field

from tercet.ipc.step_messages import Enter, Sampling, Step
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


def run_jobs(
    runner: Runner, jobs: list[Job], *, max_seqs: int, page_size: int, seed: int, budget: int = 40, max_lease: int = 4
) -> None:
    """Run every job to its end; slots and pages are drawn at random and used again."""
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
            enter.append(Enter(job.slot, pack(*job.prompt), job.num_prompt, job.sampling))
            running.append(job)
        chunks: list[int] = []
        room = budget
        decodes = [job for job in running if job.computed >= len(job.prompt) and rng.random() < 0.9]
        chunked = [job for job in running if job.computed < len(job.prompt)]
        rng.shuffle(decodes)
        lengths: dict[int, int] = {}
        for job in chunked:
            length = min(len(job.prompt) - job.computed, rng.randint(1, 20), room)
            if length:
                chunks += [job.slot, job.computed, length]
                lengths[id(job)] = length
                room -= length
        chunked = [job for job in chunked if id(job) in lengths]
        count = 1 if chunks else rng.randint(1, max_lease)
        pages: list[int] = []
        for job in (*decodes, *chunked):
            reach = job.computed + lengths.get(id(job), count)
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
                longest=max((job.computed + 1 for job in decodes), default=0),
            )
        )
        landings = [runner.launch(index) for index in range(count)]
        for landing in landings:
            tokens = landing.wait().tolist()
            assert len(tokens) == len(decodes) + len(chunked)
            for job, token in zip(decodes, tokens, strict=False):
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
