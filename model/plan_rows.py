"""The rows of a plan as its steps have them: slots that decode, each with as many rows as it tries tokens, then chunks.

Knows numbers only; what is computed for rows is the runner's matter.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tercet.ipc.step_messages import Step
from tercet.model.step_shape import StepShape


class PlanRows(NamedTuple):
    """Of one plan."""

    decodes: NDArray[np.int32]
    """Slots."""
    chunks: NDArray[np.int32]
    """[3, C]: slot, first position, length."""
    longest: int = 0
    """As the plan says it."""
    num_guesses: int = 0

    @classmethod
    def of(cls, step: Step) -> "PlanRows":
        chunks = np.frombuffer(step.chunks, np.int32).reshape(-1, 3).T
        return cls(np.frombuffer(step.decodes, np.int32), chunks, step.longest, step.num_guesses)

    @property
    def width(self) -> int:
        """Rows of a slot that decodes."""
        return self.num_guesses + 1

    @property
    def num_decode_rows(self) -> int:
        return len(self.decodes) * self.width

    @property
    def num_results(self) -> int:
        """Of a step."""
        return self.num_decode_rows + int(self.chunks.shape[1])

    @property
    def slots(self) -> NDArray[np.int32]:
        """Of all results."""
        return np.concatenate([np.repeat(self.decodes, self.width), self.chunks[0]])

    @property
    def num_prefill_tokens(self) -> int:
        return int(self.chunks[2].sum())

    def results_of(self, decodes: NDArray[np.intp]) -> NDArray[np.intp]:
        """Which results are of these, by their places among `decodes`, and of chunks."""
        of_decodes = (decodes[:, None] * self.width + np.arange(self.width)).ravel()
        return np.concatenate([of_decodes, np.arange(self.num_decode_rows, self.num_results)])

    def places(self, shape: StepShape) -> NDArray[np.intp]:
        """Where the results of a step are that is padded to `shape`."""
        padded = shape.num_decodes
        return np.concatenate([np.arange(self.num_decode_rows), np.arange(padded, padded + self.chunks.shape[1])])
