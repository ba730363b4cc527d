"""A worker in plain Python that believes nothing: it executes plans and checks every key and value they read.

What stands in the cache for a token is the identity of its whole prefix, so a page that holds the right token after the
wrong prefix is found out. Tokens are a function of seed, position and prefix: the same request always says the same.
"""

from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from tercet.ipc.messages import Sampled, Sampling, Step

VOCABULARY = 50


def identity(previous: bytes, token: int) -> bytes:
    return blake2b(previous + token.to_bytes(4, "little"), digest_size=8).digest()


def next_token(seed: int, prefix: bytes) -> int:
    return int.from_bytes(blake2b(prefix + seed.to_bytes(8, "little"), digest_size=4).digest(), "little") % VOCABULARY


def undisturbed(prompt: list[int], sampling: Sampling) -> list[int]:
    """What a request says when it is alone and nothing goes wrong."""
    stops = set(np.frombuffer(sampling.stop_ids, np.int32).tolist())
    prefix, said = b"", []
    for token in prompt:
        prefix = identity(prefix, token)
    while len(said) < sampling.max_tokens:
        said.append(next_token(sampling.seed, prefix))
        if said[-1] in stops and len(said) >= sampling.min_tokens:
            break
        prefix = identity(prefix, said[-1])
    return said


@dataclass
class Slot:
    tokens: list[int]
    num_prompt: int
    sampling: Sampling
    pages: dict[int, int] = field(default_factory=dict)
    done: bool = False


class SimulatedWorker:
    """Plans are issued at once and executed later, in order, one sub-step at a time."""

    def __init__(self, num_slots: int, num_pages: int, page_size: int, max_tokens: int) -> None:
        self._num_slots, self._num_pages, self._page_size, self._max_tokens = (
            num_slots,
            num_pages,
            page_size,
            max_tokens,
        )
        self._cache: dict[tuple[int, int], bytes] = {}
        self._slots: dict[int, Slot] = {}
        self._queue: deque[tuple[Step, int]] = deque()
        self._last_issued = -1
        self._issued_tables: dict[int, dict[int, int]] = {}
        self._writes_in_flight: deque[tuple[int, set[tuple[int, int]]]] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._queue)

    def issue(self, step: Step) -> None:
        """Take a plan, and check it against the plans that are still to be executed."""
        assert step.step_id == self._last_issued + 1
        self._last_issued = step.step_id
        rows = self._rows(step)
        assert step.count >= 1
        assert step.count == 1 or not step.chunks
        assert sum(length for _, _, length in rows) <= self._max_tokens
        slots = [slot for slot, _, _ in rows]
        assert len(set(slots)) == len(slots), "a slot has two rows in one step"
        for enter in step.enter:
            assert 0 <= enter.slot < self._num_slots
            named = {slot for _, writes in self._writes_in_flight for slot, _ in writes}
            assert enter.slot not in named, "a slot is entered while a plan in flight names it"
            self._issued_tables[enter.slot] = {}
        for slot, index, page in self._triples(step):
            assert 0 < page < self._num_pages
            for _, writes in self._writes_in_flight:
                assert all(page != written or slot == by for by, written in writes), "a page in flight changes hands"
            self._issued_tables[slot][index] = page
        # A row may write to any page of its slot's table; only full prefix pages are ever shared.
        writes = {(slot, page) for slot in slots for page in self._last_pages(slot)}
        self._writes_in_flight.append((step.step_id, writes))
        self._queue.append((step, 0))

    def _last_pages(self, slot: int) -> list[int]:
        table = self._issued_tables[slot]
        return [table[max(table)]]

    def execute(self) -> Sampled:
        """Run the oldest sub-step."""
        step, index = self._queue.popleft()
        if index == 0:
            self._apply(step)
        written: dict[tuple[int, int], bytes] = {}
        token_ids = [self._run_row(*row, written) for row in self._rows(step)]
        self._cache |= written  # rows of one step do not see each other's writes
        if index + 1 < step.count:
            self._queue.appendleft((step, index + 1))
        else:
            self._writes_in_flight.popleft()
        return Sampled(step.step_id, index, np.array(token_ids, np.int32).tobytes())

    def _apply(self, step: Step) -> None:
        for enter in step.enter:
            tokens = np.frombuffer(enter.token_ids, np.int32).tolist()
            self._slots[enter.slot] = Slot(tokens, enter.num_prompt, enter.sampling)
        for slot, index, page in self._triples(step):
            self._slots[slot].pages[index] = page

    def _run_row(self, slot_index: int, start: int, length: int, written: dict[tuple[int, int], bytes]) -> int:
        slot = self._slots[slot_index]
        is_decode = start < 0
        if is_decode:
            if slot.done:
                return -1
            start, length = len(slot.tokens) - 1, 1
        prefix = b""
        for position in range(start + length):
            prefix = identity(prefix, slot.tokens[position])
            place = (slot.pages[position // self._page_size], position % self._page_size)
            if position >= start:
                written[place] = prefix
            else:
                assert self._cache.get(place) == prefix, f"slot {slot_index} reads wrong K and V at {position}"
        if start + length < len(slot.tokens):
            return -1
        token = next_token(slot.sampling.seed, prefix)
        slot.tokens.append(token)
        generated = len(slot.tokens) - slot.num_prompt
        stops = np.frombuffer(slot.sampling.stop_ids, np.int32)
        assert generated <= slot.sampling.max_tokens
        slot.done = generated == slot.sampling.max_tokens or (token in stops and generated >= slot.sampling.min_tokens)
        return token

    @staticmethod
    def _rows(step: Step) -> list[tuple[int, int, int]]:
        decodes = [(slot, -1, 1) for slot in np.frombuffer(step.decodes, np.int32).tolist()]
        return decodes + [tuple(row) for row in np.frombuffer(step.chunks, np.int32).reshape(-1, 3).tolist()]

    @staticmethod
    def _triples(step: Step) -> list[tuple[int, int, int]]:
        return [tuple(triple) for triple in np.frombuffer(step.pages, np.int32).reshape(-1, 3).tolist()]
