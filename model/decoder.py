"""The decoder on one rank: embedding and layers; what makes tokens of hidden states is its head (`head.py`).

One class serves every family: what sets them apart is in the ModelConfig and in which weights are there.

Of a prompt only the last token is sampled from: which layers all tokens go through, and which the rows alone, is said
in `passage.py`.

Shape suffixes: T tokens of the step, R rows that sample, D hidden size, V vocabulary of this rank, S slots, M pages of
a slot.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tercet.model.adapters import LayerAdapters
from tercet.model.attention_plan import Attending, AttentionPlan, depths, minds_length
from tercet.model.cache_tables import CacheTables, one_table
from tercet.model.config import ModelConfig
from tercet.model.exchanged_residual import ExchangedResidual
from tercet.model.head import Head
from tercet.model.joined_residual import JoinedResidual
from tercet.model.layer_inputs import layer_inputs
from tercet.model.layers import make_layers
from tercet.model.padded_shapes import SHORT_ROWS, Shapes
from tercet.model.parallel import Group
from tercet.model.passage import Hear, Passage
from tercet.model.rank_weights import Weights
from tercet.model.residual import Residual
from tercet.model.rope import query_scales, rotary_tables
from tercet.model.score_head import ScoreHead
from tercet.model.states import LayerState, States, held_by_layers
from tercet.model.trial_shapes import TrialShapes
from tercet.model.vision import Vision
from tercet.model.vision_config import axes
from tercet.triton_kernels.axis_turns import axis_turns
from tercet.triton_kernels.embedding import embedding
from tercet.triton_kernels.image_rows import place_image_rows
from tercet.triton_kernels.prepare import StepInputs
from tercet.triton_kernels.rows_alone import rows_alone
from tercet.triton_kernels.scaled_embedding import scaled_embedding
from tercet.triton_kernels.scaled_weight import ScaledWeight

_SMALL = 2048
"""Hidden size up to which attention is so much of a step that it pays to serve several short rows in another way."""
_FEWEST_WIDENED = 8
"""Rows of x from which on its tiles are whole: partly outside they cost a step of Qwen3-8B in FP8 or of four bits more
than rows of padding do."""


class Beginning(NamedTuple):
    """What layers begin with."""

    stream_TD: Tensor
    joined_TE: Tensor | None = None
    """What the first product of the first of them reads in place of the stream, normed: twice as wide."""


class Decoder:
    """The model of one rank. It holds weights and rotary tables, and no state of any request."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        group: Group,
        max_model_len: int,
        *,
        deterministic: bool = False,
        guesses: bool = False,
        adapters: Sequence[LayerAdapters] = (),
        exchanges: bool = True,
        vision: Vision | None = None,
        tables: CacheTables | None = None,
    ) -> None:
        """`guesses`: there will be steps with several tokens of one request; `adapters`: of each layer, if any;
        `exchanges`: sums over ranks may be those that the group has places for, step by step; `vision`: what sees
        images, if there may be any; `tables`: by which layers find their keys and values, if not all by one."""
        self.config = config
        self.tables = one_table(config) if tables is None else tables
        self.group = group
        self.max_model_len = max_model_len
        self.weights = weights
        self._exchanges = exchanges
        self.deterministic = deterministic
        self.vision = vision
        self.head = Head(
            weights.final_norm_D, weights.lm_head_VD, config.stream_eps, config.vocab_size, config.logit_softcap, group,
            deterministic,
        )  # fmt: skip
        self.adapters = adapters
        self.num_adapters = max((layer.count for layer in adapters), default=0)
        # To a fused kernel other rows of the step are no keys. Where a token's bits are its own, one kernel serves all.
        self._fuses = not ((deterministic and guesses) or config.qk_norm_behind)
        # Rounded as by transformers for Gemma; others' are whole numbers. Of the division see `ModelConfig.stream_eps`.
        rounded = torch.tensor(config.embedding_multiplier, dtype=self.dtype).item()
        self._embedding_factor = rounded / config.residual_multiplier
        device = weights.embedding_VD.device
        own = config.rope, config.turning_dim()
        rotary_dim = config.rope.rotary_dim(own[1])
        turns = rotary_tables(config.turns, rotary_dim, max_model_len, device)
        scales = {rope: query_scales(rope, max_model_len, device) for rope, _ in turns}
        self.turns_by_axes = vision is not None and vision.config.sections is not None
        """Whether images turn their tokens, and those behind, otherwise than words."""
        if vision is not None and vision.config.sections is not None:
            self._turns_PR = turns[own]
            by_axis = axes(vision.config.sections, vision.config.interleaved, rotary_dim // 2)
            self._axis_F = torch.tensor(by_axis, dtype=torch.int32, device=device)
            """Of each frequency, which of the three numbers of a place in an image turns it."""
        # A window that no sequence outgrows is none, unless images see each other in layers that have one.
        in_windows = vision is not None and vision.config.in_windows
        max_seen = sys.maxsize if in_windows else max_model_len
        self._layers = make_layers(
            config, weights, group, turns, scales, max_seen, self.tables, deterministic=deterministic, adapters=adapters
        )
        borrowers = (index for index, heads in enumerate(config.layer_heads) if heads.borrowed)
        self._first_borrower = next(borrowers, config.num_layers)
        """From here on no layer makes keys and values."""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and KV cache."""
        return self.weights.embedding_VD.dtype

    def shapes(
        self, kv_cache: Sequence[Tensor], max_num_seqs: int, max_num_batched_tokens: int,
        trials: TrialShapes | None = None,
    ) -> Shapes:  # fmt: skip
        """The sizes that steps are padded to. `kv_cache`: see `forward`."""
        deep = {} if self.config.latent else depths(
            self._attending(kv_cache), num_heads=self._num_heads, deterministic=self.deterministic
        )  # fmt: skip
        return Shapes(
            max_num_seqs,
            max_num_batched_tokens,
            short_rows=self.short_rows(kv_cache),
            short_trials=self.short_rows(kv_cache, trials.tries) if trials else 0,
            fewest_rows=_FEWEST_WIDENED if self._widens else 2,
            most_deep=deep,
            trials=trials,
            adapted=self.num_adapters > 0,
            always_adapted=self.num_adapters > 0 and self.deterministic,
            sees=self.vision is not None,
        )

    @property
    def tries_apart(self) -> bool:
        """Whether several tokens of a slot are rows of their own, each with the bits that it has alone."""
        return self.deterministic

    @property
    def _widens(self) -> bool:
        """Whether all products of layers read weights of eight bits or four. Experts do not count: those that padding
        chooses would be read."""
        return self.config.experts is None and isinstance(self.weights.layers[0].qkv_ND, ScaledWeight)

    @property
    def _num_heads(self) -> int:
        """Of this rank."""
        return self.config.num_heads // self.group.size

    def _attending(self, kv_cache: Sequence[Tensor]) -> list[Attending]:
        """The layers that have part of the cache, in their order, as it has them."""
        caching = [one.attention for index, one in enumerate(self._layers) if self.config.carried_of(index) is None]
        return [
            Attending(one.scoring, held[0], one.cos_sin_PR.shape[1], one.table, one.heads.borrowed)
            for one, held in zip(caching, kv_cache, strict=True)
        ]

    def short_rows(self, kv_cache: Sequence[Tensor], tries: int = 1) -> int:
        """Up to how many rows, of `tries` tokens each, `forward` serves in another way if it is told `longest`."""
        if self.config.latent or not self._fuses or not minds_length(
            self._attending(kv_cache), num_heads=self._num_heads, deterministic=self.deterministic, tries=tries
        ):  # fmt: skip
            return 0
        return SHORT_ROWS if self.config.hidden_size <= _SMALL else 1

    @torch.inference_mode()
    def forward(
        self, inputs: StepInputs, kv_cache: Sequence[Tensor], page_table_SM: Tensor, states: States | None = None, *,
        longest: int = 0, deep: int = 0, begin: Callable[[], Beginning] | None = None, hear: Hear | None = None,
    ) -> Tensor:  # fmt: skip
        """Hidden states of the rows, before the final norm: [R, D]. Writes all tokens' K and V into `kv_cache`.

        `kv_cache`: of each layer that has part of it, [k/v, page, kv head, token, dim]; `page_table_SM`: as of
        `SlotTable`; `longest`: tokens that a decode row has at most, of a few that are short; `deep`: of few prefill
        tokens some come behind so many; `begin`: makes what layers begin with, in place of the tokens' embeddings, and
        looks these up first; `hear`: is told each layer's number and the stream ahead of it, [T, D], which is gone by
        the next. Graph-safe: fixed shapes give fixed launches.
        """
        tables = inputs, kv_cache, page_table_SM, states
        return self._through(*tables, whole=False, longest=longest, deep=deep, begin=begin, hear=hear)[0]

    @torch.inference_mode()
    def forward_whole(
        self, inputs: StepInputs, kv_cache: Sequence[Tensor], page_table_SM: Tensor, states: States | None = None, *,
        deep: int = 0, hear: Hear | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The same, and hidden states of all tokens: [T, D]. To the bit, but on several ranks in default mode."""
        tables = inputs, kv_cache, page_table_SM, states
        hidden_RD, residual = self._through(*tables, whole=True, deep=deep, hear=hear)
        return hidden_RD, residual.end()

    @torch.inference_mode()
    def embed(self, ids_T: Tensor) -> Tensor:
        """[T, D]; launched without overlap."""
        shard_VD = self.weights.embedding_VD
        first = self.group.rank * shard_VD.shape[0]
        if self._embedding_factor == 1:
            stream_TD = embedding(ids_T, shard_VD, first)
        else:
            stream_TD = scaled_embedding(ids_T, shard_VD, first, self._embedding_factor)
        return self.group.all_reduce(stream_TD)  # of numbers of which all but one are zero: exact in any order

    def turns(self, positions_T: Tensor, turns_T3: Tensor) -> Tensor:
        """Cosines and sines of a step's tokens, [T, R]: of places in images, and as others' where those are -1. Of a
        decoder that `turns_by_axes`."""
        turns_TR = self._turns_PR.new_empty(len(positions_T), self._turns_PR.shape[1])
        axis_turns(self._turns_PR, turns_T3, self._axis_F, turns_TR, else_T=positions_T)
        return turns_TR

    def _through(
        self, inputs: StepInputs, kv_cache: Sequence[Tensor], page_table_SM: Tensor, states: States | None, *,
        whole: bool, longest: int = 0, deep: int = 0, begin: Callable[[], Beginning] | None = None,
        hear: Hear | None = None,
    ) -> tuple[Tensor, Residual]:  # fmt: skip
        """Hidden states of the rows, [R, D], and the stream: of all tokens to its end if that is wanted `whole`."""
        ways: dict[str, Any] = {"num_heads": self._num_heads, "deterministic": self.deterministic}
        attending, count, alone_from = self._attending(kv_cache), len(self._layers), self._first_borrower
        goes_alone = alone_from < count and len(inputs.chunk_slots_C) > 0  # else each token is a row
        all_go_on = whole or hear is not None
        plan = AttentionPlan.of_step(
            inputs, attending[:alone_from] if goes_alone and not all_go_on else attending, page_table_SM, **ways,
            longest=longest, deep=deep, fuses=self._fuses, latent=self.config.latent,
        )  # fmt: skip
        alone = None
        if goes_alone:
            of_rows, borrowers = rows_alone(inputs), attending[alone_from:]
            alone = of_rows, AttentionPlan.of_step(of_rows, borrowers, page_table_SM, **ways, longest=0, deep=0)
        passage = self._begin(inputs, held_by_layers(self.config, kv_cache, states), page_table_SM, plan, begin, whole)
        passage = replace(passage, hear=hear)
        if alone is None:
            return passage.through(0, count - 1).through_last(whole=whole), passage.residual
        rows = passage.through(0, alone_from).rows_alone(*alone)
        hidden_RD = rows.through(alone_from, count).residual.end()
        if all_go_on:
            passage.through(alone_from, count)
        return hidden_RD, passage.residual

    def _begin(
        self, inputs: StepInputs, held: Sequence[Tensor | LayerState], page_table_SM: Tensor, plan: AttentionPlan,
        begin: Callable[[], Beginning] | None, whole: bool,
    ) -> Passage:  # fmt: skip
        """All tokens ahead of the first layer. Behind the plan: it is launched without overlap, so that attention may
        read the plan before it waits."""
        beginning = Beginning(self.embed(inputs.input_ids_T)) if begin is None else begin()
        images, ids_T = inputs.image_rows, inputs.input_ids_T
        if images is not None:
            place_image_rows(beginning.stream_TD, ids_T, images.stream_TD, add=False)
        told_TX, how = None, self.config.layer_inputs
        if self.weights.inputs is not None and how is not None:
            told_TX = layer_inputs(
                ids_T, beginning.stream_TD, self.weights.inputs, self.group, self.config.rms_norm_eps, how.image_id,
                deterministic=self.deterministic,
            )  # fmt: skip
        residual = self._residual(beginning, inputs, whole=whole)
        return Passage(self._layers, held, page_table_SM, inputs, plan, residual, told_TX)

    def _residual(self, beginning: Beginning, inputs: StepInputs, *, whole: bool) -> Residual:
        eps, deterministic = self.config.stream_eps, self.deterministic
        stream_TD, joined_TE = beginning
        if joined_TE is not None:
            return JoinedResidual(
                stream_TD, joined_TE, self.group, eps, deterministic=deterministic, rows=inputs.told_tokens_1
            )  # fmt: skip
        # Blocks with norms of their own need the sum over ranks before those; what adapters add is not made in halves.
        # Nor can rows be added to what is still on its way.
        plain = inputs.groups_T is None and inputs.image_rows is None
        halves = self._exchanges and not whole and self.config.norms.behind_attention is None and plain
        if halves and (exchange := self.group.exchange_for(len(stream_TD))):
            return ExchangedResidual(
                stream_TD, self.group, eps, exchange, deterministic=deterministic, rows=inputs.num_tokens_1
            )
        return Residual(stream_TD, self.group, eps, deterministic=deterministic, rows=inputs.told_tokens_1)

    def room_for_rows(self, num_rows: int) -> Tensor:
        """Memory for the hidden states of so many rows."""
        return self.weights.embedding_VD.new_zeros(num_rows, self.config.hidden_size)

    @property
    def score_head(self) -> ScoreHead | None:
        """What classifies, if anything does."""
        return ScoreHead.of(self.config, self.weights.score_LD)
