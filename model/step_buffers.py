"""Memory for the inputs of any step, cut to each step's shape. Different shapes share it, so graphs of all can.

Shape suffixes: as in `triton_kernels/prepare.py`; W words of a plan.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tercet.model.step_shape import StepShape
from tercet.triton_kernels.prepare import StepInputs, StepRows
from tercet.triton_kernels.trials import Trials


class StepBuffers:
    """Fixed buffers. The plan's rows are not copied: they are read where the plan's words are."""

    def __init__(self, max_rows: int, max_tokens: int, words_W: Tensor, num_page_tables: int = 1) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=words_W.device)

        self._words_W = words_W
        self._input_ids, self._positions = empty(max_tokens), empty(max_tokens)
        self._kv_slots = empty(num_page_tables, _aligned(max_tokens), dtype=torch.int64)
        self._decode_lengths, self._query_starts = empty(max_rows), empty(max_rows + 1)
        self._sample_rows, self._sample_positions = empty(max_rows), empty(max_rows)
        self._num_tokens = empty(1)
        self._row_slots, self._trial_ends = empty(max_rows), empty(max_rows)

    def cut(self, shape: StepShape) -> tuple[StepInputs, StepRows]:
        """Views of this shape."""
        B, C = shape.num_decodes, shape.num_chunks
        T, R = B + shape.num_prefill_tokens, B + C
        starts, lengths, _ = _offsets(shape)
        slots_R, starts_C = self._words_W[:R], self._words_W[starts : starts + C]
        inputs = StepInputs(
            input_ids_T=self._input_ids[:T],
            positions_T=self._positions[:T],
            kv_slots_XT=self._kv_slots[:, :T],
            decode_slots_B=slots_R[:B],
            decode_lengths_B=self._decode_lengths[:B],
            chunk_slots_C=slots_R[B:],
            chunk_starts_C=starts_C,
            query_starts_C1=self._query_starts[: C + 1],
            sample_rows_R=self._sample_rows[:R],
            num_tokens_1=self._num_tokens,
        )
        return inputs, StepRows(slots_R, starts_C, self._words_W[lengths : lengths + C], self._sample_positions[:R])

    def cut_trials(self, shape: StepShape) -> Trials:
        """Views of a shape with guesses. Plans have only the slots of it."""
        B, T = shape.num_trials, shape.num_decodes
        return Trials(
            slots_B=self._words_W[:B],
            ends_B=self._trial_ends[:B],
            input_ids_T=self._input_ids[:T],
            positions_T=self._positions[:T],
            kv_slots_XT=self._kv_slots[:, :T],
            lengths_T=self._decode_lengths[:T],
            slots_T=self._row_slots[:T],
            next_positions_T=self._sample_positions[:T],
            num_tokens_1=self._num_tokens,
        )


def write_rows(
    words: NDArray[np.int32], shape: StepShape, decodes: NDArray[np.int32], chunks: NDArray[np.int32], dummy: int
) -> int:
    """Write a step's rows, padded to `shape`, where `cut` reads them; `chunks` is [3, C]. Returns the words used."""
    num_decodes, num_chunks = len(decodes), chunks.shape[1]
    if shape.num_trials:
        words[:num_decodes] = decodes
        words[num_decodes : shape.num_trials] = dummy
        return _aligned(shape.num_trials)
    B, C = shape.num_decodes, shape.num_chunks
    starts, lengths, end = _offsets(shape)
    words[:num_decodes] = decodes
    words[num_decodes:end] = 0
    words[num_decodes:B] = dummy
    words[B : B + num_chunks] = chunks[0]
    words[B + num_chunks : B + C] = dummy
    words[starts : starts + num_chunks] = chunks[1]
    words[lengths : lengths + num_chunks] = chunks[2]
    return end


def max_row_words(max_rows: int) -> int:
    """Words that the rows of any step take at most."""
    return _offsets(StepShape(0, max_rows, 0))[2]


def _offsets(shape: StepShape) -> tuple[int, int, int]:
    """Where starts and lengths of chunks are, and the end. Aligned to 16 bytes, or kernels would compile once more."""
    starts = _aligned(shape.num_decodes + shape.num_chunks)
    lengths = starts + _aligned(shape.num_chunks)
    return starts, lengths, lengths + _aligned(shape.num_chunks)


def _aligned(num_words: int) -> int:
    return -(-num_words // 4) * 4
