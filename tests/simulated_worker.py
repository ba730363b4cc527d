"""A worker in plain Python that believes nothing: it executes plans and checks every key and value they read.

What stands in the cache for a token is the identity of its whole prefix, so a page that holds the right token after the
wrong prefix is found out. Tokens are a function of seed, position and prefix: the same request always says the same.
"""

from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from tercet.ipc.step_messages import Draw, Sampled, Sampling, Step

VOCABULARY = 50


def identity(previous: bytes, token: int) -> bytes:
    return blake2b(previous + token.to_bytes(4, "little"), digest_size=8).digest()


def next_token(seed: int, prefix: bytes) -> int:
    return int.from_bytes(blake2b(prefix + seed.to_bytes(8, "little"), digest_size=4).digest(), "little") % VOCABULARY


def root(sampling: Sampling) -> bytes:
    """An adapter makes other keys and values of the same tokens."""
    return b"" if sampling.adapter_load < 0 else b"%d" % sampling.adapter_load


def undisturbed(prompt: list[int], sampling: Sampling) -> list[int]:
    """What a request says when it is alone and nothing goes wrong."""
    stops = set(np.frombuffer(sampling.stop_ids, np.int32).tolist())
    prefix, said = root(sampling), list[int]()
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
    """Those before what was brought are -1 until they are read."""
    num_prompt: int
    sampling: Sampling
    pages: dict[int, int] = field(default_factory=dict)
    done: bool = False


@dataclass
class Occupied:
    """A slot as plans describe it, before any of them is executed."""

    num_entered: int
    num_cached: int
    pages: list[int] = field(default_factory=list)
    num_planned: int = -1

    def __post_init__(self) -> None:
        self.num_planned = self.num_cached
        assert self.num_cached < self.num_entered, "nothing is left to compute"

    def plan(self, start: int, length: int) -> None:
        """A chunk, or with start -1 a decode."""
        if start < 0:
            assert self.num_planned >= self.num_entered, "a decode before the prompt is computed"
        else:
            assert start == self.num_planned, "a chunk does not follow the one before it"
            assert 0 < length <= self.num_entered - start
        self.num_planned += length


class SimulatedWorker:
    """Plans are issued at once and executed later, in order, one sub-step at a time."""

    def __init__(self, num_slots: int, num_pages: int, page_size: int, max_tokens: int) -> None:
        self._num_slots, self._num_pages = num_slots, num_pages
        self._page_size, self._max_tokens = page_size, max_tokens
        self._cache: dict[tuple[int, int], bytes] = {}
        self._last_of: dict[bytes, int] = {}
        """The token at the end of each prefix there was."""
        self._slots: dict[int, Slot] = {}
        self._queue: deque[tuple[Step, int]] = deque()
        self._last_issued = -1
        self._has_guessed = False
        """Since then plans know of rows only how long they can be."""
        self._occupied: dict[int, Occupied] = {}
        self._named: deque[set[int]] = deque()
        """Of each plan in flight: the slots that have a row in it."""
        self._awaited: Step | None = None
        """The last plan, whose draw has not come yet."""
        self._late: dict[int, set[int]] = {}
        """Rows that draw nothing, by plan."""
        self._read: deque[set[int]] = deque()
        """Of each plan in flight: every page that a row's table names."""

    @property
    def computed(self) -> int | None:
        """The step that the device has come to the draw of, if that is still to come."""
        return None if self.can_execute or self._awaited is None else self._awaited.step_id

    @property
    def can_execute(self) -> bool:
        """Not the last plan, while that has no draw."""
        return bool(self._queue) and self._queue[0][0] is not self._awaited

    @property
    def in_flight(self) -> int:
        """Sub-steps that are still to be executed come from this many plans."""
        return len(self._named)

    def issue(self, step: Step) -> None:
        """Take a plan, and check it against the plans that are still to be executed."""
        assert self._awaited is None, "a plan behind one that has no draw"
        assert not (step.awaits and (step.count > 1 or step.chunks)), "a plan with prompts waits for masks"
        self._awaited = step if step.awaits else None
        assert step.step_id == self._last_issued + 1
        self._last_issued = step.step_id
        rows = self._rows(step)
        assert rows, "a plan that computes nothing"
        assert step.count >= 1
        assert step.count == 1 or not step.chunks
        assert not (step.num_guesses and (step.chunks or step.awaits or step.masks)), "guesses beside what has none"
        self._has_guessed |= step.num_guesses > 0
        assert sum(length for _, _, length in rows) <= self._max_tokens
        slots = [slot for slot, _, _ in rows]
        assert len(set(slots)) == len(slots), "a slot has two rows in one step"
        self._check_slots(step)
        self._check_pages(step)
        for slot, start, length in rows:
            self._occupied[slot].plan(start, length if start >= 0 else step.count * (1 + step.num_guesses))
        self._named.append(set(slots))
        sources = {source for source, _ in self._copies(step)}
        self._read.append({page for slot in slots for page in self._occupied[slot].pages} | sources)
        self._queue.append((step, 0))

    def draw(self, draw: Draw) -> None:
        """Take the rest of the last plan."""
        assert self._awaited is not None
        assert draw.step_id == self._awaited.step_id
        if draw.more_come:
            assert draw.masks
            assert not draw.late
            return
        late = np.frombuffer(draw.late, np.int32).tolist()
        rows = self._rows(self._awaited)
        for row in late:
            self._occupied[rows[row][0]].num_planned -= 1
        self._late[draw.step_id] = set(late)
        self._awaited = None

    def _check_slots(self, step: Step) -> None:
        for slot in np.frombuffer(step.leave, np.int32).tolist():
            del self._occupied[slot]
        starts = {slot: start for slot, start, _ in self._rows(step)}
        for enter in step.enter:
            assert 0 <= enter.slot < self._num_slots
            assert enter.slot not in self._occupied, "a slot is entered and nobody left it"
            assert not any(enter.slot in named for named in self._named), "a slot of a plan in flight is entered"
            start = starts[enter.slot]
            self._occupied[enter.slot] = Occupied(enter.num_tokens, start)

    def _check_pages(self, step: Step) -> None:
        """A page that a request will write is nobody else's, and of no plan in flight; or a copy, if it is begun."""
        copied = set()
        for slot, index, page in self._triples(step):
            assert 0 < page < self._num_pages
            occupied = self._occupied[slot]
            assert index == len(occupied.pages), "a page table has a gap"
            if (index + 1) * self._page_size > occupied.num_cached:
                assert not any(page in other.pages for other in self._occupied.values()), "a held page is given out"
                assert not any(page in read for read in self._read), "a page of a plan in flight changes hands"
            occupied.pages.append(page)
            if index * self._page_size < occupied.num_cached < (index + 1) * self._page_size:
                copied.add(page)
        assert copied == {target for _, target in self._copies(step)}, "a part of a page is taken from the cache"
        for source, _ in self._copies(step):
            assert any(source in other.pages for other in self._occupied.values()), "nobody holds what is copied"

    def execute(self) -> Sampled:
        """Run the oldest sub-step."""
        step, index = self._queue.popleft()
        assert step is not self._awaited
        late = self._late.pop(step.step_id, set())
        if index == 0:
            self._apply(step)
        decoding = [self._slots[slot] for slot, start, _ in self._rows(step) if start < 0]
        lengths = [len(slot.tokens) for slot in decoding if not slot.done]
        most = step.longest + index * (1 + step.num_guesses)
        assert max(lengths, default=0) <= most, "a row is longer than the plan says"
        if len(lengths) == len(decoding) > 0 and not self._has_guessed:  # of those that are done plans know no better
            assert max(lengths) == step.longest + index
        written: dict[tuple[int, int], bytes] = {}
        token_ids: list[int] = []
        for number, row in enumerate(self._rows(step)):
            if step.num_guesses:
                token_ids += self._run_trial(row[0], step.num_guesses, written)
            else:
                token_ids.append(self._run_row(*row, written, draws=number not in late))
        self._cache |= written  # rows of one step do not see each other's writes
        if index + 1 < step.count:
            self._queue.appendleft((step, index + 1))
        else:
            self._named.popleft()
            self._read.popleft()
        return Sampled(step.step_id, index, np.array(token_ids, np.int32).tobytes())

    def _apply(self, step: Step) -> None:
        for enter in step.enter:
            tokens = [-1] * enter.first + np.frombuffer(enter.token_ids, np.int32).tolist()
            self._slots[enter.slot] = Slot(tokens, enter.num_prompt, enter.sampling)
        for slot, index, page in self._triples(step):
            self._slots[slot].pages[index] = page
        for source, target in self._copies(step):
            for offset in range(self._page_size):
                self._cache.pop((target, offset), None)
                if (source, offset) in self._cache:
                    self._cache[target, offset] = self._cache[source, offset]

    def _run_row(
        self, slot_index: int, start: int, length: int, written: dict[tuple[int, int], bytes], *, draws: bool
    ) -> int:
        slot = self._slots[slot_index]
        is_decode = start < 0
        if is_decode:
            if slot.done:
                return -1
            start, length = len(slot.tokens) - 1, 1
        prefix = self._compute(slot_index, start, length, written)
        if start + length < len(slot.tokens) or not draws:
            return -1
        token = next_token(slot.sampling.seed, prefix)
        self._append(slot, token)
        return token

    def _run_trial(self, slot_index: int, num_guesses: int, written: dict[tuple[int, int], bytes]) -> list[int]:
        """Some guesses, of which two of three are right. Those behind a wrong one leave their keys, too."""
        slot = self._slots[slot_index]
        if slot.done:
            return [-1] * (1 + num_guesses)
        first = len(slot.tokens)
        prefix = self._compute(slot_index, first - 1, 1, written)
        room = slot.num_prompt + slot.sampling.max_tokens - first
        num_tried = min(prefix[0] % (num_guesses + 1), room - 1)
        token_ids, holds = [], True
        for position in range(first, first + num_tried + 1):
            token = next_token(slot.sampling.seed, prefix)
            token_ids.append(token if holds else -2)
            if holds:
                self._append(slot, token)
            guessed = token if prefix[1] % 3 else (token + 1) % VOCABULARY
            holds = holds and guessed == token and not slot.done
            if position < first + num_tried:
                prefix = identity(prefix, guessed)
                self._write(slot_index, position, prefix, written)
        return token_ids + [-1] * (num_guesses - num_tried)

    def _compute(self, slot_index: int, start: int, length: int, written: dict[tuple[int, int], bytes]) -> bytes:
        """Some of a slot's tokens, whose prefix is read; returns the identity of what is there then."""
        slot, prefix = self._slots[slot_index], root(self._slots[slot_index].sampling)
        for position in range(start + length):
            place = (slot.pages[position // self._page_size], position % self._page_size)
            if slot.tokens[position] < 0:  # whose keys these are, what is sampled will tell
                slot.tokens[position] = self._last_of[self._cache[place]]
            prefix = identity(prefix, slot.tokens[position])
            self._last_of[prefix] = slot.tokens[position]
            if position >= start:
                self._write(slot_index, position, prefix, written)
            else:
                assert self._cache.get(place) == prefix, f"slot {slot_index} reads wrong K and V at {position}"
        return prefix

    def _write(self, slot_index: int, position: int, prefix: bytes, written: dict[tuple[int, int], bytes]) -> None:
        written[self._slots[slot_index].pages[position // self._page_size], position % self._page_size] = prefix

    @staticmethod
    def _append(slot: Slot, token: int) -> None:
        slot.tokens.append(token)
        generated = len(slot.tokens) - slot.num_prompt
        stops = np.frombuffer(slot.sampling.stop_ids, np.int32)
        assert generated <= slot.sampling.max_tokens
        slot.done = generated == slot.sampling.max_tokens or (token in stops and generated >= slot.sampling.min_tokens)

    @staticmethod
    def _rows(step: Step) -> list[tuple[int, int, int]]:
        decodes = [(slot, -1, 1) for slot in np.frombuffer(step.decodes, np.int32).tolist()]
        return decodes + [tuple(row) for row in np.frombuffer(step.chunks, np.int32).reshape(-1, 3).tolist()]

    @staticmethod
    def _copies(step: Step) -> list[tuple[int, int]]:
        return [tuple(pair) for pair in np.frombuffer(step.copies, np.int32).reshape(-1, 2).tolist()]

    @staticmethod
    def _triples(step: Step) -> list[tuple[int, int, int]]:
        return [tuple(triple) for triple in np.frombuffer(step.pages, np.int32).reshape(-1, 3).tolist()]
