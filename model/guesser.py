"""The model's own layer that guesses, on one rank: from hidden states of tokens, and the tokens behind them, to hidden
states that stand for those of the latter, of which the model's own head makes guesses, or what `guess_head.py` has made
of it.

It is a decoder of one layer, which begins with other numbers than embeddings. Knows no request; when it is asked, and
where guesses go, is `guess_ahead.py`'s matter.

Shape suffixes: T tokens of the step, R rows that sample, B slots, D hidden size, S slots of the table, M pages of one.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from tercet.model.config import ModelConfig
from tercet.model.decoder import Beginning, Decoder
from tercet.model.linear import linear
from tercet.model.rank_weights import GuesserWeights, LayerWeights
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.join_normed import join_normed
from tercet.triton_kernels.prepare import StepInputs
from tercet.triton_kernels.sample import TokenRing, sample, sample_into
from tercet.triton_kernels.slot_table import SlotTable


class Hearing(Protocol):
    """What a guesser makes of one step's stream on the way."""

    made_TD: Tensor | None
    """Once all layers have been heard that are to be."""

    def hear(self, layer: int, stream_TD: Tensor) -> None:
        """As `Decoder.forward` says."""
        ...


class Guesser(Protocol):
    """A layer that guesses, and what makes guesses of its hidden states."""

    def hearing(self) -> Hearing | None:
        """For one step; None where it reads the model's last hidden states."""
        ...

    def forward(
        self, inputs: StepInputs, hidden_TD: Tensor, kv_cache: Sequence[Tensor], page_table_SM: Tensor, *,
        of_model: bool, longest: int = 0, deep: int = 0,
    ) -> Tensor:  # fmt: skip
        """Hidden states of the rows, before its norm: [R, D]. `inputs`: as of a step of the model, but that its ids are
        of the tokens behind those that `hidden_TD` are of; `of_model`: it is the model that has made those, or what was
        heard of it; else this layer. `kv_cache`: this layer's alone, see `Decoder.forward`. Graph-safe."""
        ...

    def draw(
        self, ring: TokenRing, hidden_BD: Tensor, slots_B: Tensor, positions_B: Tensor, table: SlotTable, *,
        whole_logits: bool,
    ) -> None:  # fmt: skip
        """A guess of each slot, into the table. `whole_logits`: some slot has a threshold. Graph-safe with kernels."""
        ...


class OwnGuesser:
    """Of a decoder whose weights have one."""

    def __init__(self, decoder: Decoder) -> None:
        config, weights, own = decoder.config, decoder.weights, decoder.weights.guesser
        assert isinstance(own, GuesserWeights)
        assert config.guesser is not None
        self._own, self._goes_on_normed = own, config.guesser.goes_on_normed
        self._main = decoder
        self._body = body_of(decoder, _of_one_layer(config), own.layer, own.norm_D, weights.lm_head_VD)
        head = self._body.head
        self._head = head if own.head_VD is None else replace(head, lm_head_VD=own.head_VD)

    def hearing(self) -> Hearing | None:
        return None

    @torch.inference_mode()
    def forward(
        self, inputs: StepInputs, hidden_TD: Tensor, kv_cache: Sequence[Tensor], page_table_SM: Tensor, *,
        of_model: bool, longest: int = 0, deep: int = 0,
    ) -> Tensor:  # fmt: skip
        own, body = self._own, self._body

        def begin() -> Beginning:
            embedded_TD = self._main.embed(inputs.input_ids_T)
            norm_D = None
            if of_model:
                norm_D = self._main.head.norm_D
            elif self._goes_on_normed:
                norm_D = own.norm_D
            norms, eps = (norm_D, own.token_norm_D, own.hidden_norm_D), body.config.rms_norm_eps
            joined_TE = join_normed(embedded_TD, hidden_TD, *norms, eps, deterministic=body.deterministic)
            rows = inputs.told_tokens_1
            return Beginning(linear(joined_TE, own.join_DE, None, deterministic=body.deterministic, rows=rows))

        return body.forward(inputs, kv_cache, page_table_SM, longest=longest, deep=deep, begin=begin)

    def draw(
        self, ring: TokenRing, hidden_BD: Tensor, slots_B: Tensor, positions_B: Tensor, table: SlotTable, *,
        whole_logits: bool,
    ) -> None:  # fmt: skip
        head, where = self._head, (slots_B, positions_B, table)
        if whole_logits:
            draw_of_all(ring, head.logits(hidden_BD), *where)
        elif use_kernels(hidden_BD):
            head.sample_into(ring, hidden_BD, *where)
        else:
            head.sample(hidden_BD, *where)


def body_of(
    decoder: Decoder, config: ModelConfig, layer: LayerWeights, norm_D: Tensor, lm_head_VD: Tensor
) -> Decoder:  # fmt: skip
    """The decoder of that one layer, beside the one that it guesses for."""
    return Decoder(
        config,
        replace(
            decoder.weights,
            layers=(layer,),
            final_norm_D=norm_D,
            lm_head_VD=lm_head_VD,
            score_LD=None,
            guesser=None,
            inputs=None,
        ),
        decoder.group,
        decoder.max_model_len,
        deterministic=decoder.deterministic,
        guesses=True,
        exchanges=False,
    )


def draw_of_all(
    ring: TokenRing, logits_BV: Tensor, slots_B: Tensor, positions_B: Tensor, table: SlotTable
) -> None:  # fmt: skip
    """Of logits of the whole vocabulary. On the CPU rows that sample nothing are left out by who samples."""
    if use_kernels(logits_BV):
        sample_into(ring, logits_BV, slots_B, positions_B, table)
    else:
        sample(logits_BV, slots_B, positions_B, table)


def _of_one_layer(config: ModelConfig) -> ModelConfig:
    assert config.guesser is not None
    experts = config.experts if config.guesser.has_experts else None
    return replace(
        config,
        num_layers=1,
        layer_windows=(),
        layer_ropes=(),
        layer_heads=(),
        carried=None,
        experts=experts and replace(experts, layers=frozenset((0,))),
        guesser=None,
        guesses=False,
        classifier=None,
        label_tokens=(),
    )
