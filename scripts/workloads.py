"""The workloads every engine is measured with: prompts, answer lengths, and what is counted.

A workload is numbers only; it knows no engine. Prompts are random token ids, the same for every engine.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Measure = Literal["output tok/s", "ms/token", "prompt tok/s", "ms to first token"]

_VOCABULARY = 10_000
_TURN = 40
"""Ids of a message of a chat, about."""


@dataclass(frozen=True)
class Workload:
    """Prompts with their answer lengths, 0 for embeddings. `measure` says how seconds become the figure; `begun`: ids
    that a prompt begins with in each run, and that the engine keeps from the run before; what follows is new."""

    name: str
    measure: Measure
    prompts: list[list[int]]
    output_lengths: list[int]
    repeats: int = 2
    begun: int = 0

    def prompts_of(self, repeat: int) -> list[list[int]]:
        """Those of one run."""
        if not self.begun:
            return self.prompts
        draw = random.Random(repeat)
        begun = self.begun
        return [[*ids[:begun], *(draw.randint(0, _VOCABULARY) for _ in ids[begun:])] for ids in self.prompts]


def nano256() -> Workload:
    """256 requests of random prompt and answer lengths, all at once: throughput."""
    draw = random.Random(0)
    prompts = [[draw.randint(0, _VOCABULARY) for _ in range(draw.randint(100, 1024))] for _ in range(256)]
    return Workload("nano256", "output tok/s", prompts, [draw.randint(100, 1024) for _ in range(256)])


def steady_decode(batch: int, context: int, name: str) -> Workload:
    """`batch` prompts of `context` ids: the time of one more token for all of them."""
    num_tokens = 512 if batch == 1 else 128 if batch >= 256 or context > 8192 else 256
    return Workload(name, "ms/token", _random_prompts(batch, context), [2 + num_tokens] * batch)


def crowd(batch: int, context: int, name: str) -> Workload:
    """`batch` prompts of `context` ids, 256 tokens each: what the cache has room for at a time decides."""
    return Workload(name, "output tok/s", _random_prompts(batch, context), [256] * batch)


def prefill() -> Workload:
    """16 prompts of 8,192 ids, one token each."""
    return Workload("prefill", "prompt tok/s", _random_prompts(16, 8192), [1] * 16)


def first_token(context: int, name: str) -> Workload:
    """One prompt, one token."""
    return Workload(name, "ms to first token", _random_prompts(1, context), [1], repeats=5)


def next_turn(context: int, name: str) -> Workload:
    """A message behind a chat of `context` ids that the engine has kept: one token."""
    return Workload(name, "ms to first token", _random_prompts(1, context + _TURN), [1], repeats=9, begun=context)


def embeddings(batch: int, length: int, name: str) -> Workload:
    """`batch` prompts of `length` ids, all at once: their embeddings."""
    return Workload(name, "prompt tok/s", _random_prompts(batch, length), [0] * batch, repeats=3)


def small(batch: int, name: str) -> Workload:
    """`batch` prompts of 32 ids, 128 tokens each: what a CPU can do in seconds."""
    return Workload(name, "output tok/s", _random_prompts(batch, 32), [128] * batch, repeats=4)


def workload(name: str) -> Workload:
    """The workload of that name: nano256, bsB_ctxC, crowdB_ctxC, prefill, ttft_C, turn_C, embedB_ctxC,
    cpuB."""
    for pattern, make in _FAMILIES.items():
        if match := re.fullmatch(pattern, name):
            return make(name, *(int(number) for number in match.groups()))
    wanted = "nano256, bsB_ctxC (bs8_ctx1024), crowdB_ctxC, prefill, ttft_C, turn_C, embedB_ctxC or cpuB"
    raise ValueError(f"workload {name!r} is unknown; want {wanted}")


_FAMILIES: dict[str, Callable[..., Workload]] = {
    "nano256": lambda name: nano256(),
    r"bs(\d+)_ctx(\d+)": lambda name, batch, context: steady_decode(batch, context, name),
    r"crowd(\d+)_ctx(\d+)": lambda name, batch, context: crowd(batch, context, name),
    "prefill": lambda name: prefill(),
    r"ttft_(\d+)": lambda name, context: first_token(context, name),
    r"turn_(\d+)": lambda name, context: next_turn(context, name),
    r"embed(\d+)_ctx(\d+)": lambda name, batch, context: embeddings(batch, context, name),
    r"cpu(\d+)": lambda name, batch: small(batch, name),
}

STANDARD = [
    "nano256",
    "bs1_ctx128",
    "bs8_ctx1024",
    "bs64_ctx1024",
    "bs256_ctx1024",
    "bs8_ctx32000",
    "prefill",
    "ttft_8192",
    "ttft_512",
]


def _random_prompts(count: int, length: int) -> list[list[int]]:
    draw = random.Random(count * 1_000_003 + length)
    return [[draw.randint(0, _VOCABULARY) for _ in range(length)] for _ in range(count)]
