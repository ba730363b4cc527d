"""What steps say beyond their tokens, to whoever asked, started on its way to the host: log-probabilities, embeddings.

Knows the order of things; what is made of them on the host is in `step_extra.py`.

Shape suffixes: R rows, W words of a row, T tokens of the step, C chunks, D hidden size.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tercet.model.decoder import Decoder
from tercet.model.extras import Extras
from tercet.model.host_copies import HostCopy, HostRooms
from tercet.model.plan_rows import PlanRows
from tercet.model.step_extra import StepExtra, StepLogs, StepVectors
from tercet.model.step_shape import StepShape
from tercet.model.token_logs import Chunk, prompt_logs
from tercet.triton_kernels.slot_table import SlotTable


class BeyondTokens:
    """Of one runner's steps, one after the other."""

    def __init__(self, decoder: Decoder, table: SlotTable, extras: Extras) -> None:
        self._decoder = decoder
        self._table = table
        self._extras = extras
        self._rooms = HostRooms()
        self._prompt_logs: list[tuple[Chunk, list[Tensor]]] = []
        """Of the step launched last."""

    def begin(self) -> None:
        """A step comes."""
        self._prompt_logs = []

    def log_prompts(self, hidden_TD: Tensor, rows: PlanRows, shape: StepShape) -> None:
        """It has tokens of prompts whose log-probabilities are wanted."""
        chunks = self._extras.logged_chunks(len(rows.decodes), shape.num_decodes, rows.chunks)
        self._prompt_logs = [(chunk, prompt_logs(self._decoder, hidden_TD, chunk, self._table)) for chunk in chunks]

    @torch.inference_mode()
    def copied(
        self, rows: PlanRows, shape: StepShape, logs_RW: Tensor | None, hidden_CD: Tensor,
        computed: NDArray[np.intp], places: NDArray[np.intp],
    ) -> StepExtra | None:  # fmt: skip
        """What it says, if anything. `hidden_CD`: of its chunks; `computed`: rows of the results; `places`: where they
        are among the logs."""
        logs = self._logs(rows, logs_RW, computed, places) if shape.logged or shape.of_prompts else None
        vectors = None
        if embedded := self._extras.embedded(rows.chunks):
            words = HostCopy(self._decoder.head.normed(hidden_CD).view(torch.int32), self._rooms)
            kind = hidden_CD.dtype, self._decoder.config.logits_scaling, self._decoder.score_head
            vectors = StepVectors(embedded, rows.num_decode_rows, words, *kind)
        return StepExtra(logs, vectors) if logs or vectors else None

    def _logs(
        self, rows: PlanRows, logs_RW: Tensor | None, computed: NDArray[np.intp], places: NDArray[np.intp]
    ) -> StepLogs:
        logged = self._extras.logged(rows.slots[computed])
        prompts = [(chunk, [HostCopy(block, self._rooms) for block in blocks]) for chunk, blocks in self._prompt_logs]
        if logs_RW is None:  # no row samples
            logged[:] = False
            logs_RW = torch.empty(0, 2, dtype=torch.int32)
        return StepLogs(computed[logged], places[logged], HostCopy(logs_RW, self._rooms), prompts)
