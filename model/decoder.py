"""The dense decoder on one rank: embedding, layers, final norm, logits.

One class serves every family: what sets them apart is in the ModelConfig and in which weights are there.

Shape suffixes: T tokens of the step, R rows that sample, D hidden size, V vocabulary, S slots, M pages of a slot.
"""

import torch
from torch import Tensor

from tercet.model.config import ModelConfig
from tercet.model.layers import Layer
from tercet.model.linear import rms_norm_linear
from tercet.model.parallel import Group
from tercet.model.rope import rotary_table
from tercet.model.weights import Weights
from tercet.triton_kernels.decode_attention import DecodeWork, make_decode_work, plan_decode_work
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.embedding import embedding
from tercet.triton_kernels.prepare import StepInputs


class Decoder:
    """The model of one rank. It holds weights and the rotary table, and no state of any request."""

    def __init__(
        self, config: ModelConfig, weights: Weights, group: Group, max_model_len: int, *, deterministic: bool = False
    ) -> None:
        self.config = config
        self.group = group
        self.max_model_len = max_model_len
        self._weights = weights
        self._deterministic = deterministic
        device = weights.embedding_VD.device
        cos_sin_PR = rotary_table(config.rope, config.head_dim, max_model_len, device)
        self._layers = [
            # A window that no sequence outgrows is none.
            Layer(
                config=config,
                weights=layer,
                group=group,
                cos_sin_PR=cos_sin_PR,
                window=window if window < max_model_len else 0,
                interleaved=weights.interleaved,
                deterministic=deterministic,
            )
            for layer, window in zip(weights.layers, config.layer_windows, strict=True)
        ]

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and KV cache."""
        return self._weights.embedding_VD.dtype

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, kv_cache: Tensor, page_table_SM: Tensor) -> Tensor:
        """Hidden states of all tokens, before the final norm: [T, D]. Writes their K and V into `kv_cache`.

        `kv_cache`: [layer, k/v, page, kv head, token, dim]; `page_table_SM`: each slot's pages.
        Graph-safe: fixed shapes give fixed launches.
        """
        shard_VD = self._weights.embedding_VD
        residual_TD = embedding(inputs.input_ids_T, shard_VD, self.group.rank * shard_VD.shape[0])
        self.group.all_reduce(residual_TD)
        update_TD = None
        work = self._plan_decodes(inputs, kv_cache, page_table_SM)
        for index, layer in enumerate(self._layers):
            update_TD = layer.forward(residual_TD, update_TD, inputs, page_table_SM, kv_cache[index], work)
        return residual_TD if update_TD is None else residual_TD.add_(update_TD)

    def _plan_decodes(self, inputs: StepInputs, kv_cache: Tensor, page_table_SM: Tensor) -> DecodeWork | None:
        """Split the decode rows once, on the device, for the attention of all layers."""
        num_rows = inputs.decode_slots_B.shape[0]
        if not num_rows or not use_kernels(kv_cache):
            return None
        num_kv_heads, page_size, head_dim = kv_cache.shape[3:]
        # Not the cache's pages: with shared prefixes the rows can be longer, all together, than the cache.
        num_pages = num_rows * page_table_SM.shape[1]
        num_heads = self.config.num_heads // self.group.size
        work = make_decode_work(
            num_rows, num_pages, page_size, num_heads, num_kv_heads, head_dim, kv_cache.device,
            deterministic=self._deterministic,
        )  # fmt: skip
        plan_decode_work(inputs.decode_lengths_B, inputs.decode_slots_B, work, num_kv_heads)
        return work

    @torch.inference_mode()
    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Logits over the whole vocabulary, the same on every rank: [R, D] -> [R, V]."""
        return self.group.all_gather(self.logits_shard(hidden_RD))[:, : self.config.vocab_size]

    @torch.inference_mode()
    def logits_shard(self, hidden_RD: Tensor) -> Tensor:
        """This rank's columns of the logits, the zeros of vocabulary padding included."""
        weights = self._weights
        return rms_norm_linear(
            hidden_RD,
            weights.final_norm_D,
            self.config.rms_norm_eps,
            weights.lm_head_VD,
            None,
            deterministic=self._deterministic,
        )
