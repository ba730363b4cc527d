"""Guesses of the tokens behind those that a step has sampled, by a layer that guesses: the end of each step.

Of every step the layer computes keys and values of its own, or it would know of a sequence no more than a part. Guesses
are drawn where the step has few enough slots that they may be tried, and stand in the slot table behind the slots'
lengths then. They are drawn as the model's tokens are, with the same noise for the same position: so they agree more
often than two draws would. What a slot has that is no guess by now is tried all the same: it is wrong, and no more.

Shape suffixes: B slots, N tokens of each, T tokens of the step, R rows, D hidden size, K guesses.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tercet.model.forward_step import Forwarded
from tercet.model.guesser import Guesser, Hearing
from tercet.model.kv_cache import num_pages_of, page_size_of
from tercet.model.runner_settings import GuessSettings
from tercet.model.sampler import takes_whole_logits
from tercet.model.step_shape import StepShape
from tercet.triton_kernels.embedding import embedding
from tercet.triton_kernels.guess_rows import GuessRows, guess_rows
from tercet.triton_kernels.next_ids import next_ids
from tercet.triton_kernels.prepare import StepInputs
from tercet.triton_kernels.sample import TokenRing
from tercet.triton_kernels.slot_table import SlotTable, tokens_at


class GuessAhead:
    """Of one runner: the layer, its part of the cache, and memory for what it reads."""

    def __init__(
        self, guesser: Guesser, settings: GuessSettings, table: SlotTable, kv_cache: Sequence[Tensor], max_tokens: int
    ) -> None:
        """`kv_cache`: of the layer alone, see `Decoder.forward`; `max_tokens`: of a step."""
        self._guesser, self._table, self._kv_cache = guesser, table, kv_cache
        self._num_guesses, self._most_slots = settings.num_guesses, settings.most_slots
        device, most = table.length_S.device, settings.most_slots

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        each = settings.num_guesses, most
        numbers = empty(most), empty(*each), empty(*each), empty(*each, dtype=torch.int64), empty(*each), empty(1)
        self._rows = GuessRows(*numbers)
        self._next_ids = empty(max_tokens)
        self._ring = TokenRing(empty(1, most), empty(1))
        # Guesses are no tokens yet: no slot is longer by one, nor done.
        self._drawing = replace(table, length_S=empty(len(table.length_S)), done_S=empty(len(table.length_S)))

    def hearing(self) -> Hearing | None:
        """For the next step."""
        return self._guesser.hearing()

    @torch.inference_mode()
    def run(self, forwarded: Forwarded, shape: StepShape) -> None:
        """Once the step has sampled. Graph-safe."""
        rows = forwarded.rows
        ids_T = self._next_ids[: len(forwarded.inputs.input_ids_T)]
        next_ids(forwarded.inputs, rows.slots_R, self._table, ids_T)
        # Tokens of images are nothing here but their hidden states.
        inputs = replace(forwarded.inputs, input_ids_T=ids_T, groups_T=None, groups_R=None, image_rows=None)
        hidden_TD = forwarded.guessed_from_TD
        assert hidden_TD is not None
        hidden_RD = self._forward(inputs, hidden_TD, of_model=True, longest=shape.longest, deep=shape.deep)
        num_slots = shape.num_trials or shape.num_decodes + shape.num_chunks
        if not num_slots or num_slots > self._most_slots:
            return
        slots_B = rows.slots_R if forwarded.trials is None else forwarded.trials.slots_B
        guesses = self._rows.cut(num_slots)
        page_size, num_pages = page_size_of(self._kv_cache), num_pages_of(self._kv_cache)
        guess_rows(guesses, slots_B, rows.positions_R, self._table, page_size=page_size, num_pages=num_pages)
        hidden_BD = hidden_RD if forwarded.trials is None else embedding(guesses.picks_B, hidden_RD)
        for guess in range(self._num_guesses):
            positions_B = guesses.next_positions_KB[guess]
            if guess:
                ids_B = tokens_at(slots_B, guesses.next_positions_KB[guess - 1], self._table)
                of_guess = replace(guesses.inputs(guess, ids_B, slots_B), shifts_S=inputs.shifts_S)
                hidden_BD = self._forward(of_guess, hidden_BD, of_model=False)
            self._guesser.draw(
                self._ring, hidden_BD, slots_B, positions_B, self._drawing, whole_logits=takes_whole_logits(shape)
            )

    def _forward(
        self, inputs: StepInputs, hidden_TD: Tensor, *, of_model: bool, longest: int = 0, deep: int = 0
    ) -> Tensor:
        return self._guesser.forward(
            inputs, hidden_TD, self._kv_cache, self._table.page_table_SM, of_model=of_model, longest=longest, deep=deep
        )
