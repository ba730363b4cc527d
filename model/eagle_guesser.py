"""A layer that guesses from another checkpoint (EAGLE-3), on one rank: as `guesser.py` has the model's own.

It hears the stream ahead of three of the model's layers, early and late ones, and makes of them together what stands
for a token; its first product reads the next token's embedding beside that. It has a head of its own for the tokens
that occur most.

Shape suffixes: T tokens of the step, R rows that sample, B slots, D hidden size, E = 2 D, S slots of the table, M pages
of one.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tercet.model.decoder import Beginning, Decoder
from tercet.model.guesser import Hearing, body_of, draw_of_all
from tercet.model.linear import linear, linear_add
from tercet.model.rank_weights import EagleWeights
from tercet.triton_kernels.add_rms_norm import rms_norm
from tercet.triton_kernels.join_normed import join_normed
from tercet.triton_kernels.prepare import StepInputs
from tercet.triton_kernels.sample import TokenRing
from tercet.triton_kernels.slot_table import SlotTable
from tercet.triton_kernels.spread_logits import spread_logits


class _Hearing:
    """Adds up what is made of each stream that is heard, so that none has to be kept."""

    def __init__(self, hears: Mapping[int, Tensor], *, deterministic: bool) -> None:
        self._hears, self._deterministic = hears, deterministic
        self.made_TD: Tensor | None = None

    def hear(self, layer: int, stream_TD: Tensor) -> None:
        if (matrix_DD := self._hears.get(layer)) is None:
            return
        if self.made_TD is None:
            self.made_TD = linear(stream_TD, matrix_DD, None, deterministic=self._deterministic)
        else:
            linear_add(stream_TD, matrix_DD, self.made_TD, deterministic=self._deterministic)


class EagleGuesser:
    """Of a decoder whose weights have one."""

    def __init__(self, decoder: Decoder) -> None:
        own = decoder.weights.guesser
        assert isinstance(own, EagleWeights)
        self._own, self._main = own, decoder
        self._body = body_of(decoder, own.config, own.layer, own.norm_D, own.lm_head_UD)

    def hearing(self) -> Hearing | None:
        return _Hearing(self._own.hears, deterministic=self._body.deterministic)

    @torch.inference_mode()
    def forward(
        self, inputs: StepInputs, hidden_TD: Tensor, kv_cache: Sequence[Tensor], page_table_SM: Tensor, *,
        of_model: bool, longest: int = 0, deep: int = 0,
    ) -> Tensor:  # fmt: skip
        """Uses `hidden_TD` up; whose they are makes no difference."""
        own, body = self._own, self._body

        def begin() -> Beginning:
            embedded_TD = self._main.embed(inputs.input_ids_T)
            eps, deterministic = body.config.rms_norm_eps, body.deterministic
            norms = None, own.token_norm_D, own.hidden_norm_D
            joined_TE = join_normed(embedded_TD, hidden_TD, *norms, eps, deterministic=deterministic)
            if not own.begins_normed:
                return Beginning(hidden_TD, joined_TE)
            return Beginning(rms_norm(hidden_TD, own.hidden_norm_D, eps, deterministic=deterministic), joined_TE)

        return body.forward(inputs, kv_cache, page_table_SM, longest=longest, deep=deep, begin=begin)

    def draw(
        self, ring: TokenRing, hidden_BD: Tensor, slots_B: Tensor, positions_B: Tensor, table: SlotTable, *,
        whole_logits: bool,
    ) -> None:  # fmt: skip
        """By ids of the model's vocabulary, since these say which noise is whose."""
        logits_BU = self._body.head.logits(hidden_BD)
        places_V = self._own.places_V
        logits_BV = logits_BU if places_V is None else spread_logits(logits_BU, places_V)
        draw_of_all(ring, logits_BV, slots_B, positions_B, table)
