"""What the layers of a vision encoder do, in all families.

Knows weights and kernels; knows no pixels, nor how an image's patches lie.

Shape suffixes: P patches, T rows (patches, and what is ahead of them), N tokens of an image, D the encoder's hidden
size, E numbers of a token's patches, O the language model's hidden size, F inner size, R rotary dimension.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tercet.model.image_grid import ImageGrid
from tercet.model.linear import linear
from tercet.model.vision_config import VisionConfig
from tercet.model.vision_weights import (
    ClippedLinear,
    GatedMerger,
    Linear,
    MeanPooler,
    Merger,
    Norm,
    Pooler,
    VisionLayer,
    VisionWeights,
)
from tercet.triton_kernels.add_normed import add_normed, add_normed_rms_norm
from tercet.triton_kernels.add_rms_norm import add_rms_norm, rms_norm
from tercet.triton_kernels.clamp_into import clamp_into
from tercet.triton_kernels.embedding import embedding
from tercet.triton_kernels.full_attention import full_attention
from tercet.triton_kernels.gelu import gelu
from tercet.triton_kernels.gelu_and_mul import gelu_and_mul
from tercet.triton_kernels.head_norms import norm_heads
from tercet.triton_kernels.layer_norm import add_layer_norm, layer_norm
from tercet.triton_kernels.mean_rows import mean_rows
from tercet.triton_kernels.qk_norm import qk_norm
from tercet.triton_kernels.residual_add import residual_add
from tercet.triton_kernels.silu_and_mul import silu_and_mul
from tercet.triton_kernels.turn_rows import turn_rows

_QK_EPS = 1e-6
"""Of norms of queries and keys, whatever that of others is."""


class Segments(NamedTuple):
    """Who attends to whom, and where everybody is."""

    grid: ImageGrid
    turns_PR: Tensor | None
    """None: nothing turns."""


class Stream:
    """Hidden states of patches; what a block adds to them waits for the next norm, which adds it on its way."""

    def __init__(self, stream_PD: Tensor) -> None:
        self._stream_PD = stream_PD
        self._update_PD: Tensor | None = None
        self._behind: Norm | None = None

    def add(self, update_PD: Tensor, behind: Norm | None) -> None:
        """Normed, if there is a norm for that. A norm is read before there is another one."""
        assert self._update_PD is None
        self._update_PD, self._behind = update_PD, behind

    def normed(self, norm: Norm) -> Tensor:
        update_PD, self._update_PD = self._update_PD, None
        if update_PD is None:
            return normed(self._stream_PD, norm)
        if self._behind is not None:
            return add_normed_rms_norm(
                update_PD, self._stream_PD, self._behind.weight_D, norm.weight_D, norm.eps, deterministic=True
            )
        if norm.bias_D is None:
            return add_rms_norm(update_PD, self._stream_PD, norm.weight_D, norm.eps, deterministic=True)
        return add_layer_norm(update_PD, self._stream_PD, norm.weight_D, norm.bias_D, norm.eps)

    def whole(self) -> Tensor:
        update_PD, self._update_PD = self._update_PD, None
        if update_PD is not None and self._behind is not None:
            add_normed(update_PD, self._stream_PD, self._behind.weight_D, self._behind.eps, deterministic=True)
        elif update_PD is not None:
            residual_add(update_PD, self._stream_PD)
        return self._stream_PD


class VisionLayers:
    """All layers, and what makes rows for the language model of what they see."""

    def __init__(self, config: VisionConfig, weights: VisionWeights, *, deterministic: bool) -> None:
        self._config, self._weights = config, weights
        self._deterministic = deterministic
        self._deep = dict(zip(config.deep_layers, weights.deep, strict=True))

    def run(self, stream: Stream, segments: Segments) -> tuple[Tensor, ...]:
        """All layers on the stream; rows of what some have seen."""
        deep = []
        for index, layer in enumerate(self._weights.layers):
            behind_attention, behind_mlp = layer.norms_behind or (None, None)
            stream.add(self._attended(stream.normed(layer.norm1), layer, segments, index), behind_attention)
            inner_PF = self._activated(self.linear(stream.normed(layer.norm2), layer.up))
            stream.add(self.linear(inner_PF, layer.down), behind_mlp)
            if (merger := self._deep.get(index)) is not None:
                joined_NE = stream.whole().view(-1, len(merger.norm.weight_D))
                deep.append(self.merged(normed(joined_NE, merger.norm), merger))
        return tuple(deep)

    def rows(self, stream: Stream, grid: ImageGrid) -> Tensor:
        """What the language model gets of what layers have made: [N, O]."""
        merger = self._weights.merger
        if isinstance(merger, MeanPooler):
            unit = self._config.hidden_size**0.5
            mean_ND = mean_rows(stream.whole(), self._config.merge**2, unit, merger.standard)
            return self.linear(normed(mean_ND, merger.norm_of_mean), merger.out)
        if grid.patches_P is None:
            return self.merged(stream.normed(merger.norm), merger)
        last_norm = self._weights.last_norm
        made_TD = stream.whole() if last_norm is None else stream.normed(last_norm)
        joined_NE = embedding(grid.patches_P, made_TD).view(-1, len(merger.norm.weight_D))
        return self.merged(normed(joined_NE, merger.norm), merger)

    def merged(self, normed_PD: Tensor, merger: Merger | GatedMerger | Pooler) -> Tensor:
        """Of normed patches, or tokens: [N, O]."""
        if isinstance(merger, Pooler):
            mean_ND = mean_rows(normed_PD, self._config.merge**2)
            return self.linear(normed(mean_ND, merger.norm_of_mean), merger.out)
        joined_NE = normed_PD.view(-1, self._config.hidden_size * self._config.merge**2)
        if isinstance(merger, GatedMerger):
            first_NO = self.linear(self.linear(joined_NE, merger.join), merger.first)
            bent_NO = gelu(normed(first_NO, merger.first_norm), "exact")
            return self.linear(silu_and_mul(self.linear(bent_NO, merger.up)), merger.down)
        if merger.join is not None:
            joined_NE = self.linear(joined_NE, merger.join)
        return self.linear(gelu(self.linear(joined_NE, merger.first), "exact"), merger.second)

    def linear(self, x_MK: Tensor, by: Linear | ClippedLinear) -> Tensor:
        if isinstance(by, ClippedLinear):
            return self._clipped(x_MK, by)
        return linear(x_MK, by.weight_NK, by.bias_N, deterministic=self._deterministic)

    def _clipped(self, x_MK: Tensor, by: ClippedLinear) -> Tensor:
        made_MN, first = x_MK.new_empty(len(x_MK), sum(map(len, by.weights))), 0
        for weight_NK, (going_in_2, coming_out_2) in zip(by.weights, by.bounds_P22, strict=True):
            clipped_MK = clamp_into(x_MK, going_in_2, torch.empty_like(x_MK))
            part_MN = linear(clipped_MK, weight_NK, None, deterministic=self._deterministic)
            clamp_into(part_MN, coming_out_2, made_MN, first)
            first += len(weight_NK)
        return made_MN

    def _attended(self, normed_PD: Tensor, layer: VisionLayer, segments: Segments, index: int) -> Tensor:
        heads, grid = self._config.num_heads, segments.grid
        qkv_PN = self.linear(normed_PD, layer.qkv)
        if layer.qk_norm_J is not None:
            qk_norm(qkv_PN, layer.qk_norm_J, len(layer.qk_norm_J) // 2, _QK_EPS)
        if layer.head_norm_3D is not None:
            norm_heads(qkv_PN, layer.head_norm_3D, heads, self._config.eps)
        if segments.turns_PR is not None:
            turn_rows(qkv_PN, segments.turns_PR, heads)
        ends_S, longest = grid.ends_1, len(qkv_PN)
        if self._config.has_windows(index):
            ends_S, longest = grid.ends_S, grid.longest
        attended_PD = full_attention(qkv_PN, ends_S, longest, heads, self._config.score_scale)
        return self.linear(attended_PD, layer.o)

    def _activated(self, inner: Tensor) -> Tensor:
        match self._config.activation:
            case "silu":
                return silu_and_mul(inner)
            case "gelu":
                return gelu_and_mul(inner)
            case kind:
                return gelu(inner, kind)


def normed(x_TD: Tensor, norm: Norm) -> Tensor:
    """As a norm makes it of rows to which nothing is to be added."""
    if norm.bias_D is None:
        return rms_norm(x_TD, norm.weight_D, norm.eps, deterministic=True)
    return layer_norm(x_TD, norm.weight_D, norm.bias_D, norm.eps)
