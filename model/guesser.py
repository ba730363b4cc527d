"""The layer that guesses, on one rank: from hidden states of tokens, and the tokens behind them, to hidden states that
stand for those of the latter, of which the model's own head makes guesses, or what `guess_head.py` has made of it.

It is a decoder of one layer, which begins with other numbers than embeddings. Knows no request; when it is asked, and
where guesses go, is `guess_ahead.py`'s matter.

Shape suffixes: T tokens of the step, R rows that sample, D hidden size, S slots, M pages of a slot.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tercet.model.config import ModelConfig
from tercet.model.decoder import Decoder
from tercet.model.linear import linear
from tercet.triton_kernels.embedding import embedding
from tercet.triton_kernels.join_normed import join_normed
from tercet.triton_kernels.prepare import StepInputs


class Guesser:
    """Of a decoder whose weights have one."""

    def __init__(self, decoder: Decoder) -> None:
        config, weights, own = decoder.config, decoder.weights, decoder.weights.guesser
        assert own is not None
        assert config.guesser is not None
        self._own, self._goes_on_normed = own, config.guesser.goes_on_normed
        self._main = decoder
        self._body = Decoder(
            _of_one_layer(config),
            replace(weights, layers=(own.layer,), final_norm_D=own.norm_D, score_LD=None, guesser=None),
            decoder.group,
            decoder.max_model_len,
            deterministic=decoder.deterministic,
            guesses=True,
            exchanges=False,
        )
        head = self._body.head
        self.head = head if own.head_VD is None else replace(head, lm_head_VD=own.head_VD)

    @torch.inference_mode()
    def forward(
        self, inputs: StepInputs, hidden_TD: Tensor, kv_cache: Tensor, page_table_SM: Tensor, *, of_model: bool,
        longest: int = 0, deep: int = 0,
    ) -> Tensor:  # fmt: skip
        """Hidden states of the rows, before its norm: [R, D]. `inputs`: as of a step of the model, but that its ids are
        of the tokens behind those that `hidden_TD` are of; `of_model`: it is the model that has made those, else this
        layer. `kv_cache`: [1, k/v, page, kv head, token, dim], this layer's. Graph-safe."""

        def begin() -> Tensor:
            embedded_TD = self._main.embed(inputs.input_ids_T)
            norm_D = None
            if of_model:
                norm_D = self._main.head.norm_D
            elif self._goes_on_normed:
                norm_D = self._own.norm_D
            norms = norm_D, self._own.token_norm_D, self._own.hidden_norm_D
            config, deterministic = self._body.config, self._body.deterministic
            joined_TE = join_normed(
                embedded_TD, hidden_TD, *norms, config.rms_norm_eps, deterministic=deterministic
            )  # fmt: skip
            return linear(joined_TE, self._own.join_DE, None, deterministic=deterministic, rows=inputs.told_tokens_1)

        return self._body.forward(
            inputs, kv_cache, page_table_SM, longest=longest, deep=deep, begin=begin
        )  # fmt: skip

    @staticmethod
    def picked(hidden_RD: Tensor, rows_B: Tensor) -> Tensor:
        """Some of the rows: [B, D]."""
        return embedding(rows_B, hidden_RD)


def _of_one_layer(config: ModelConfig) -> ModelConfig:
    assert config.guesser is not None
    experts = config.experts if config.guesser.has_experts else None
    return replace(
        config,
        num_layers=1,
        layer_windows=(),
        layer_ropes=(),
        delta=None,
        experts=experts and replace(experts, layers=frozenset((0,))),
        guesser=None,
        guesses=False,
        classifier=None,
        label_tokens=(),
    )
