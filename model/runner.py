"""Runs plans on one rank: apply what a plan changes, then prepare, forward, sample and update, step by step.

Knows the order of things and the sizes of buffers; what a step computes is the decoder's and the kernels' matter, and
which requests it serves is the scheduler's. On the CPU a step is done when `launch` returns.

Shape suffixes: as in `triton_kernels/prepare.py`; W words of a plan.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tercet.ipc.messages import Limits, Step
from tercet.model.decoder import Decoder
from tercet.model.sampler import sample_step
from tercet.model.slots import PlanBuffer, make_slot_table, pack_changes
from tercet.triton_kernels.prepare import StepInputs, StepRows, prepare
from tercet.triton_kernels.slot_table import write_pages, write_records

_CHANGE_WORDS = 2**18
"""Words of changes in one copy to the device; more go in several."""


@dataclass(frozen=True, kw_only=True)
class RunnerSettings:
    """What of an engine's configuration a runner follows; names as there."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    run_ahead: int = 2
    max_lease: int = 4
    enforce_eager: bool = False


class StepShape(NamedTuple):
    """Sizes of a step's parts, padding included."""

    num_decodes: int
    num_chunks: int
    num_prefill_tokens: int


class DoneLanding:
    """Tokens that are there already."""

    def __init__(self, token_ids_R: NDArray[np.int32]) -> None:
        self._token_ids_R = token_ids_R

    def wait(self) -> NDArray[np.int32]:
        """int32 token per row, decodes then chunks; -1 where a row sampled none."""
        return self._token_ids_R


class StepBuffers:
    """Memory for the inputs of any step, cut to each step's shape. Different shapes share it."""

    def __init__(self, max_rows: int, max_tokens: int, words_W: Tensor) -> None:
        def empty(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=words_W.device)

        self._words_W = words_W
        self._input_ids, self._positions = empty(max_tokens), empty(max_tokens)
        self._kv_slots = empty(max_tokens, torch.int64)
        self._decode_lengths, self._query_starts = empty(max_rows), empty(max_rows + 1)
        self._sample_rows, self._sample_positions = empty(max_rows), empty(max_rows)

    def cut(self, shape: StepShape) -> tuple[StepInputs, StepRows]:
        """Views of this shape. The plan's rows are read where the plan's words are."""
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
        rows = StepRows(slots_R, starts_C, self._words_W[R + C : R + 2 * C], self._sample_positions[:R])
        return inputs, rows


class Runner:
    """One rank's model, cache and slot table."""

    def __init__(self, decoder: Decoder, kv_cache: Tensor, settings: RunnerSettings) -> None:
        """`kv_cache`: [layer, k/v, page, kv head, token, dim], as `make_kv_cache` makes it."""
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._num_pages, self._page_size = kv_cache.shape[2], kv_cache.shape[4]
        device = kv_cache.device
        self.table = make_slot_table(settings.max_num_seqs, settings.max_model_len, self._page_size, device)
        max_rows = 2 * settings.max_num_seqs  # a decode and a chunk in each slot, at the very most
        self._row_words = 3 * max_rows
        self._plan = PlanBuffer(self._row_words + _CHANGE_WORDS, device, settings.run_ahead + 2)
        self._buffers = StepBuffers(max_rows, max_rows + settings.max_num_batched_tokens, self._plan.words_W)
        self._decodes = np.zeros(0, np.int32)
        self._chunks = np.zeros((3, 0), np.int32)
        dtype = str(kv_cache.dtype).removeprefix("torch.")
        self.limits = Limits(self._num_pages, settings.max_model_len, decoder.config.vocab_size, dtype, device.type)

    def begin(self, step: Step) -> None:
        """Apply what a plan changes and remember its rows."""
        for changes in pack_changes(step, self._row_words, _CHANGE_WORDS):
            end = self._row_words + len(changes.words)
            self._plan.begin()[self._row_words : end] = changes.words
            self._plan.send(end)
            words_W = self._plan.words_W
            if changes.num_records:
                write_records(words_W, self._row_words, changes.num_records, changes.longest, self.table)
            if changes.num_pages:
                triples = self._row_words + changes.triples
                write_pages(words_W, triples, changes.num_pages, self.table, self._num_pages)
        self._decodes = np.frombuffer(step.decodes, np.int32)
        self._chunks = np.frombuffer(step.chunks, np.int32).reshape(-1, 3).T

    def launch(self, index: int) -> DoneLanding:
        """Run step `index` of the plan's lease."""
        num_decodes = len(self._decodes)
        token_ids_R = np.full(num_decodes + self._chunks.shape[1], -1, np.int32)
        # A CPU saves the work of rows that are done; the tables of all ranks agree on them.
        alive = np.flatnonzero(self.table.done_S.numpy()[self._decodes] == 0)
        computed = np.concatenate([alive, np.arange(num_decodes, len(token_ids_R))])
        if len(computed):
            shape = self._place_rows(self._decodes[alive], self._chunks)
            token_ids_R[computed] = self._run(shape).numpy()
        return DoneLanding(token_ids_R)

    def _place_rows(self, decodes: NDArray[np.int32], chunks: NDArray[np.int32]) -> StepShape:
        """Write a step's rows into the plan's words."""
        shape = StepShape(len(decodes), chunks.shape[1], int(chunks[2].sum()))
        words = np.concatenate([decodes, *chunks])
        self._plan.begin()[: len(words)] = words
        self._plan.send(len(words))
        return shape

    @torch.inference_mode()
    def _run(self, shape: StepShape) -> Tensor:
        inputs, rows = self._buffers.cut(shape)
        prepare(rows, self.table, inputs, page_size=self._page_size, num_pages=self._num_pages)
        hidden_TD = self._decoder.forward(inputs, self._kv_cache, self.table.page_table_SM)
        return sample_step(self._decoder, hidden_TD, inputs, rows, self.table)
