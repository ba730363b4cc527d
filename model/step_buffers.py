"""Memory for the inputs of any step, cut to each step's shape. Different shapes share it, so graphs of all can.

Shape suffixes: as in `triton_kernels/prepare.py`; W words of a plan.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tercet.model.step_shape import StepShape
from tercet.triton_kernels.prepare import StepInputs, StepRows


class StepBuffers:
    """Fixed buffers. The plan's rows are not copied: they are read where the plan's words are."""

    def __init__(self, max_rows: int, max_tokens: int, words_W: Tensor) -> None:
        def empty(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=words_W.device)

        self._words_W = words_W
        self._input_ids, self._positions = empty(max_tokens), empty(max_tokens)
        self._kv_slots = empty(max_tokens, torch.int64)
        self._decode_lengths, self._query_starts = empty(max_rows), empty(max_rows + 1)
        self._sample_rows, self._sample_positions = empty(max_rows), empty(max_rows)

    def cut(self, shape: StepShape) -> tuple[StepInputs, StepRows]:
        """Views of this shape."""
        B, C, _ = shape
        T, R = B + shape.num_prefill_tokens, B + C
        slots_R, starts_C = self._words_W[:R], self._words_W[R : R + C]
        inputs = StepInputs(
            input_ids_T=self._input_ids[:T],
            positions_T=self._positions[:T],
            kv_slots_T=self._kv_slots[:T],
            decode_slots_B=slots_R[:B],
            decode_lengths_B=self._decode_lengths[:B],
            chunk_slots_C=slots_R[B:],
            chunk_starts_C=starts_C,
            query_starts_C1=self._query_starts[: C + 1],
            sample_rows_R=self._sample_rows[:R],
        )
        return inputs, StepRows(slots_R, starts_C, self._words_W[R + C : R + 2 * C], self._sample_positions[:R])


def write_rows(
    words: NDArray[np.int32], shape: StepShape, decodes: NDArray[np.int32], chunks: NDArray[np.int32], dummy: int
) -> int:
    """Write a step's rows, padded to `shape`, where `cut` reads them; `chunks` is [3, C]. Returns the words used."""
    B, C, _ = shape
    R = B + C
    num_decodes, num_chunks = len(decodes), chunks.shape[1]
    words[:num_decodes] = decodes
    words[num_decodes:B] = dummy
    if C:
        words[B : B + num_chunks] = chunks[0]
        words[B + num_chunks : R] = dummy
        words[R : R + 2 * C] = 0
        words[R : R + num_chunks] = chunks[1]
        words[R + C : R + C + num_chunks] = chunks[2]
    return R + 2 * C
