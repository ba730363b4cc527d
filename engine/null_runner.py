"""A runner that computes nothing (`--load-format null`): it turns the engine into a measurement of itself.

Its steps take no time, or as long as `--null-step-ms` says, one after the other as on a device.

It keeps just enough of each slot to answer as a model would: which rows sample, and when a request is done. Its ids
are made up from the position and the adapter, printable in most vocabularies, and never an end of sequence; so are its
embeddings.
"""

import time

import numpy as np
from numpy.typing import NDArray

from tercet.ipc.beyond import Beyond, Vector
from tercet.ipc.process_messages import Limits
from tercet.ipc.step_messages import Draw, Step
from tercet.ipc.swap_messages import Swap

_FIRST_ID = 1000
_NUM_IDS = 500
_ADAPTER_SHIFT = 100
"""Each adapter says other ids than the one before it."""
_HIDDEN_SIZE = 1024


class NullMidway:
    """A step that comes to its draw at a certain time."""

    def __init__(self, ready_at: float) -> None:
        self._ready_at = ready_at

    def wait(self) -> None:
        if (remaining := self._ready_at - time.monotonic()) > 0:
            time.sleep(remaining)


class NullLanding:
    """A step's tokens, and embeddings that are wanted, there at a certain time."""

    def __init__(self, token_ids: NDArray[np.int32], vectors: tuple[Vector, ...], ready_at: float) -> None:
        self._token_ids = token_ids
        self._vectors = vectors
        self._midway = NullMidway(ready_at)

    def wait(self) -> NDArray[np.int32]:
        self._midway.wait()
        return self._token_ids

    def beyond(self) -> Beyond:
        return None, (), self._vectors


class NullSwaps:
    """Copies of pages that hold nothing."""

    def precede(self, step: Step) -> None:
        pass

    def follow(self, step: Step) -> None:
        pass

    def make(self, swap: Swap) -> NullMidway:
        return NullMidway(0.0)


class NullRunner:
    """Speaks a runner's interface and has no model."""

    def __init__(self, max_num_seqs: int, max_model_len: int | None, num_pages: int, step_seconds: float) -> None:
        self.limits = Limits(num_pages, max_model_len or 8192, 2**17, "none", "none", _HIDDEN_SIZE)
        self._length = np.zeros(max_num_seqs + 1, np.int32)
        self._max_length = np.zeros(max_num_seqs + 1, np.int32)
        self._dimensions = np.zeros(max_num_seqs + 1, np.int32)
        """Of the embedding that is wanted; 0 where none is."""
        self._shift = np.zeros(max_num_seqs + 1, np.int32)
        self._slots = np.zeros(0, np.int32)
        self._samples = np.zeros(0, bool)
        self._width = 1
        self._step_seconds = step_seconds
        self._ready_at = 0.0

    def begin(self, step: Step) -> None:
        for enter in step.enter:
            self._length[enter.slot] = enter.num_tokens
            self._max_length[enter.slot] = enter.num_prompt + enter.sampling.max_tokens
            embedding = enter.sampling.embedding
            self._dimensions[enter.slot] = 0 if embedding is None else embedding.dimensions
            self._shift[enter.slot] = _ADAPTER_SHIFT * (1 + enter.sampling.adapter)
        decodes = np.frombuffer(step.decodes, np.int32)
        slots, starts, lengths = np.frombuffer(step.chunks, np.int32).reshape(-1, 3).T
        self._slots = np.concatenate([decodes, slots])
        self._width = 1 + step.num_guesses
        self._samples = np.concatenate([np.ones(len(decodes), bool), starts + lengths == self._length[slots]])

    def launch(self, index: int) -> NullLanding:
        self.launch_model()
        return self._land()

    def launch_model(self) -> NullMidway:
        self._ready_at = max(self._ready_at, time.monotonic()) + self._step_seconds
        return NullMidway(self._ready_at)

    def draw(self, draw: Draw) -> NullLanding | None:
        if draw.more_come:
            return None
        self._samples[np.frombuffer(draw.late, np.int32)] = False
        return self._land()

    def _land(self) -> NullLanding:
        # Where something is guessed, it is always right.
        slots, ahead = np.repeat(self._slots, self._width), np.tile(np.arange(self._width), len(self._slots))
        length = self._length[slots] + ahead
        alive = np.repeat(self._samples, self._width) & (length < self._max_length[slots])
        np.add.at(self._length, slots, alive)
        shown = length + self._shift[slots]
        token_ids = np.where(alive, _FIRST_ID + shown % _NUM_IDS, -1).astype(np.int32)
        vectors = []
        for row in np.flatnonzero(alive & (self._dimensions[slots] > 0)).tolist():
            values = np.arange(shown[row], shown[row] + self._dimensions[slots[row]], dtype=np.float32)
            vectors.append(Vector(row, values.tobytes()))
        return NullLanding(token_ids, tuple(vectors), self._ready_at)

    def use_lull(self) -> bool:
        return False
