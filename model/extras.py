"""What some requests want beyond plain sampling: penalties, biases and masks of their logits, log-probabilities,
embeddings.

Knows on the host which slots want something, so that a step of others runs as if there were none of this; on the
device, `AdjustmentTable` has the numbers.

Shape suffixes: S slots, R rows, V vocabulary.
"""

import struct
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tercet.ipc.step_messages import Adjustments, Embedding, Enter, Step
from tercet.model.masks import Masks
from tercet.model.token_logs import Chunk
from tercet.triton_kernels.adjustments import MAX_BIASES, RECORD_WORDS, make_adjustment_table, write_adjustments
from tercet.triton_kernels.logits import add_bias, penalize, widen
from tercet.triton_kernels.slot_table import SlotTable

_RECORD = struct.Struct("<i3f2i")
assert _RECORD.size == 4 * RECORD_WORDS
_NEUTRAL = Adjustments()


class Extras:
    """Of all slots of one rank."""

    def __init__(self, num_slots: int, device: torch.device, vocab_size: int = 0, depth: int = 1) -> None:
        """`depth`: plans whose masks may be on their way."""
        self.masks = Masks(num_slots, device, vocab_size, depth)
        self._table = make_adjustment_table(num_slots, device)
        self._adjusted_S = np.zeros(num_slots, np.bool_)
        self._logged_S = np.zeros(num_slots, np.bool_)
        self._logged_prompt_S = np.zeros(num_slots, np.int32)
        """Length of the prompt whose log-probabilities are wanted; 0 where nobody does."""
        self._embedded_S = np.zeros(num_slots, np.int32)
        """Length of the prompt whose embedding is wanted; 0 where nobody does."""
        self._embeddings: dict[int, Embedding] = {}
        """How, by slot."""
        self._special: set[int] = set()
        """Slots that want anything of this: usually there is none, and nothing to look up."""

    def pack(self, step: Step, base: int, capacity: int) -> Iterator[tuple[NDArray[np.int32], int]]:
        """Runs of at most `capacity` words, each to lie at word `base` of the device's buffer, and their records."""
        run: list[tuple[int, Adjustments]] = []
        used = 0
        for enter in step.enter:
            sampling = enter.sampling
            self._logged_S[enter.slot] = sampling.logprobs is not None
            self._logged_prompt_S[enter.slot] = 0 if sampling.prompt_logprobs is None else enter.num_prompt
            self._embedded_S[enter.slot] = 0
            if sampling.embedding is not None:
                self._embedded_S[enter.slot] = enter.num_prompt
                self._embeddings[enter.slot] = sampling.embedding
            adjustments = self._changed(enter)
            self._note(enter)
            if adjustments is None:
                continue
            num_words = RECORD_WORDS + (len(adjustments.bias_ids) + len(adjustments.biases)) // 4
            if used + num_words > capacity:
                yield _pack_records(run, base), len(run)
                run, used = [], 0
            run.append((enter.slot, adjustments))
            used += num_words
        if run:
            yield _pack_records(run, base), len(run)

    def apply(self, words_W: Tensor, base: int, num_records: int) -> None:
        """Take records as `pack` made them into the table."""
        write_adjustments(words_W, base, num_records, self._table)

    def wanted(self, *slots: NDArray[np.int32]) -> bool:
        """Whether any of these slots wants its logits adjusted."""
        return bool(self._special) and any(bool((self._adjusted_S | self.masks.held_S)[some].any()) for some in slots)

    def any_logged(self, *slots: NDArray[np.int32]) -> bool:
        """Whether log-probabilities are wanted of tokens of any of these slots."""
        return bool(self._special) and any(bool(self._logged_S[some].any()) for some in slots)

    def any_logged_prompt(self, chunks: NDArray[np.int32]) -> bool:
        """Whether they are wanted of tokens of prompts among a step's chunks."""
        return bool(self._special) and bool(self.logged_chunks(0, 0, chunks))

    def logged(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Of each slot, whether the log-probabilities of its tokens are wanted."""
        logged: NDArray[np.bool_] = self._logged_S[slots]
        return logged

    def logged_chunks(self, num_decodes: int, padded: int, chunks: NDArray[np.int32]) -> list[Chunk]:
        """The parts of prompts to be logged among a step's chunks [3, C], after `num_decodes` rows (`padded` ones)."""
        logged = []
        first = padded
        for index, (slot, start, length) in enumerate(chunks.T.tolist()):
            followed = min(length, int(self._logged_prompt_S[slot]) - 1 - start)
            if followed > 0:
                logged.append(Chunk(num_decodes + index, first, slot, start, followed))
            first += length
        return logged

    def embedded(self, chunks: NDArray[np.int32]) -> dict[int, Embedding]:
        """Which of a step's chunks [3, C] reach the end of a prompt whose embedding is wanted, and how."""
        if not self._special:
            return {}
        ends = np.flatnonzero(self._embedded_S[chunks[0]] == chunks[1] + chunks[2]).tolist()
        return {chunk: self._embeddings[int(chunks[0, chunk])] for chunk in ends}

    def adjust(self, logits_RV: Tensor, slots_R: Tensor, positions_R: Tensor, table: SlotTable) -> Tensor:
        """The logits to sample the tokens of these positions from, fp32; those given stay as they are. Masks, biases,
        then penalties. Graph-safe."""
        adjusted_RV = widen(logits_RV, slots_R, self.masks.words_SW)
        add_bias(adjusted_RV, slots_R, self._table.bias_ids_SK, self._table.bias_SK)
        penalties = self._table.repetition_S, self._table.presence_S, self._table.frequency_S
        penalize(adjusted_RV, slots_R, positions_R, table, *penalties)
        return adjusted_RV

    def _note(self, enter: Enter) -> None:
        sampling = enter.sampling
        asked = sampling.adjustments, sampling.grammar, sampling.logprobs, sampling.prompt_logprobs
        if asked == (None, None, None, None) and sampling.embedding is None:
            self._special.discard(enter.slot)
        else:
            self._special.add(enter.slot)

    def _changed(self, enter: Enter) -> Adjustments | None:
        """What is to be written into a slot that is entered; nothing if it is neutral and was."""
        adjustments, before = enter.sampling.adjustments, self._adjusted_S[enter.slot]
        self._adjusted_S[enter.slot] = adjustments is not None
        return adjustments or (_NEUTRAL if before else None)


def _pack_records(run: list[tuple[int, Adjustments]], base: int) -> NDArray[np.int32]:
    offset = len(run) * RECORD_WORDS
    records, biases = bytearray(), bytearray()
    for slot, one in run:
        count = len(one.bias_ids) // 4
        if count > MAX_BIASES:
            raise ValueError(f"slot {slot}: got {count} biases, wanted at most {MAX_BIASES}")
        penalties = one.repetition_penalty, one.presence_penalty, one.frequency_penalty
        records += _RECORD.pack(slot, *penalties, count, base + offset)
        biases += one.bias_ids + one.biases
        offset += 2 * count
    return np.frombuffer(bytes(records + biases), np.int32)
