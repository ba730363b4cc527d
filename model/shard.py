"""One rank's weights: their places, and which slice of which checkpoint tensor fills each.

Knows the tensor names of the Hugging Face layout and how a matrix is cut for ranks; reads nothing (`weights.py`).

Shape suffixes: V vocabulary rows of this rank, D hidden size, N q, k and v rows of this rank together, Q q rows of
this rank, J q and k rows of this rank, F intermediate size of this rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tercet.model.config import Experts, ModelConfig

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class MlpWeights:
    """One MLP. `gate_up_2FD`: gate rows then up rows, or in turns where `Weights.interleaved` says so."""

    gate_up_2FD: Tensor
    gate_up_bias_2F: Tensor | None
    down_DF: Tensor
    down_bias_D: Tensor | None


@dataclass(frozen=True)
class ExpertWeights:
    """Many MLPs and what chooses among them; gate and up rows in turns."""

    router_ED: Tensor
    gate_up_E2FD: Tensor
    down_EDF: Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One layer."""

    input_norm_D: Tensor | None
    qkv_ND: Tensor
    qkv_bias_N: Tensor | None
    q_norm_H: Tensor | None
    k_norm_H: Tensor | None
    qk_norm_J: Tensor | None
    o_DQ: Tensor
    o_bias_D: Tensor | None
    o_norm_D: Tensor | None
    post_norm_D: Tensor | None
    mlp: MlpWeights | ExpertWeights
    down_norm_D: Tensor | None


@dataclass(frozen=True)
class Weights:
    """All of one rank. `lm_head_VD` is the embedding itself where the two are tied."""

    embedding_VD: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_D: Tensor
    lm_head_VD: Tensor
    interleaved: bool


@dataclass(frozen=True)
class Move:
    """Copy slice `start:stop` of dimension `dim` of tensor `name` (whole shape `shape`) into `into`.

    `shift` is added to the numbers first, and then they are multiplied by `factor`.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int
    into: Tensor
    shift: float = 0.0
    factor: float = 1.0

    def changed(self, piece: Tensor) -> Tensor:
        """What goes into `into` for a piece of what was read: in fp32, to be rounded once."""
        if self.shift == 0 and self.factor == 1:
            return piece
        return (piece.float() + self.shift) * self.factor


class ShardBuilder:
    """Allocates one rank's tensors and writes down in `moves` how each is filled."""

    def __init__(self, config: ModelConfig, rank: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.rank = rank
        self.size = size
        self.moves: list[Move] = []
        self._dtype = dtype
        self._device = device

    def weights(self, interleaved: bool, tied: bool) -> Weights:
        embedding_VD = self._vocabulary(EMBEDDING)
        layers = tuple(self._layer(index, interleaved) for index in range(self.config.num_layers))
        # Logits are linear in it. Real models divide them by powers of two: that rounds nothing.
        final_norm_D = self._norm("model.norm", self.config.hidden_size, 1 / self.config.logits_scaling)
        lm_head_VD = embedding_VD if tied else self._vocabulary(LM_HEAD)
        return Weights(embedding_VD, layers, final_norm_D, lm_head_VD, interleaved)

    def _layer(self, index: int, interleaved: bool) -> LayerWeights:
        config, hidden = self.config, self.config.hidden_size
        prefix = f"model.layers.{index}."
        attention = f"{prefix}self_attn."
        many = config.experts_of(index)
        # Where blocks have norms behind them, the usual name of the one ahead of the MLP is that behind attention.
        behind = config.block_norms
        ahead_of_mlp = "pre_feedforward_layernorm" if behind else "post_attention_layernorm"
        return LayerWeights(
            input_norm_D=self._norm(f"{prefix}input_layernorm", hidden) if config.input_norms else None,
            qkv_ND=self._qkv(attention, "weight", hidden),
            qkv_bias_N=self._qkv(attention, "bias") if config.qkv_bias else None,
            q_norm_H=self._norm(f"{attention}q_norm", config.head_dim) if config.qk_norm else None,
            k_norm_H=self._norm(f"{attention}k_norm", config.head_dim) if config.qk_norm else None,
            qk_norm_J=self._wide_qk_norm(attention) if config.wide_qk_norm else None,
            o_DQ=self._columns(f"{attention}o_proj.weight", hidden, config.num_heads * config.head_dim),
            o_bias_D=self._whole(f"{attention}o_proj.bias", hidden) if config.o_bias else None,
            o_norm_D=self._norm(f"{prefix}post_attention_layernorm", hidden) if behind else None,
            post_norm_D=self._norm(f"{prefix}{ahead_of_mlp}", hidden) if config.input_norms else None,
            mlp=self._mlp(f"{prefix}mlp.", interleaved) if many is None else self._experts(prefix, many),
            down_norm_D=self._norm(f"{prefix}post_feedforward_layernorm", hidden) if behind else None,
        )

    def _mlp(self, prefix: str, interleaved: bool) -> MlpWeights:
        config, hidden = self.config, self.config.hidden_size
        return MlpWeights(
            gate_up_2FD=self._gate_up(prefix, "weight", interleaved, hidden),
            gate_up_bias_2F=self._gate_up(prefix, "bias", False) if config.mlp_bias else None,
            down_DF=self._columns(f"{prefix}down_proj.weight", hidden, config.intermediate_size),
            down_bias_D=self._whole(f"{prefix}down_proj.bias", hidden) if config.mlp_bias else None,
        )

    def _experts(self, prefix: str, experts: Experts) -> ExpertWeights:
        hidden, whole = self.config.hidden_size, experts.intermediate_size
        part = whole // self.size
        start = self.rank * part
        router_ED = self._empty(experts.count, hidden)
        self._rows(f"{prefix}{experts.block}.gate.weight", experts.count, 0, router_ED)
        gate_up_E2FD = self._empty(experts.count, 2 * part, hidden)
        down_EDF = self._empty(experts.count, hidden, part)
        for index, (gate_up, down) in enumerate(zip(gate_up_E2FD, down_EDF, strict=True)):
            name = f"{prefix}{experts.block}.experts.{index}."
            self._rows(f"{name}{experts.gate}.weight", whole, start, gate_up[0::2])
            self._rows(f"{name}{experts.up}.weight", whole, start, gate_up[1::2])
            self._share(f"{name}{experts.down}.weight", whole, down)
        return ExpertWeights(router_ED, gate_up_E2FD, down_EDF)

    def _qkv(self, prefix: str, kind: str, *inputs: int) -> Tensor:
        (q_whole, q_start, query), (kv_whole, kv_start, kv) = self._head_rows()
        into = self._empty(query + 2 * kv, *inputs)
        q, k, v = into.split([query, kv, kv])
        parts = [("q", q_whole, q_start, q), ("k", kv_whole, kv_start, k), ("v", kv_whole, kv_start, v)]
        self._projections(prefix, kind, "qkv", parts)
        return into

    def _wide_qk_norm(self, prefix: str) -> Tensor:
        (q_whole, q_start, query), (k_whole, k_start, key) = self._head_rows()
        into = self._empty(query + key)
        self._rows(f"{prefix}q_norm.weight", q_whole, q_start, into[:query])
        self._rows(f"{prefix}k_norm.weight", k_whole, k_start, into[query:])
        return into

    def _head_rows(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Of q, then of k and v: how many rows there are in all, the first of this rank, and how many it has."""
        config, head_dim = self.config, self.config.head_dim
        query = config.num_heads // self.size * head_dim
        kv = config.kv_heads_per_rank(self.size) * head_dim
        # With fewer KV heads than ranks, neighbouring ranks hold the same head.
        kv_start = self.rank * config.num_kv_heads // self.size * head_dim
        return (config.num_heads * head_dim, self.rank * query, query), (config.num_kv_heads * head_dim, kv_start, kv)

    def _gate_up(self, prefix: str, kind: str, interleaved: bool, *inputs: int) -> Tensor:
        whole = self.config.intermediate_size
        part = whole // self.size
        into = self._empty(2 * part, *inputs)
        gate, up = (into[0::2], into[1::2]) if interleaved else (into[:part], into[part:])
        start = self.rank * part
        self._projections(prefix, kind, "gate_up", [("gate", whole, start, gate), ("up", whole, start, up)])
        return into

    def _projections(self, prefix: str, kind: str, stack: str, parts: list[tuple[str, int, int, Tensor]]) -> None:
        """Fill places from tensors by these names, or from one in which they are on top of each other: ranks share each
        of them then, too. Of each: its name, its rows, the first for this rank, their place."""
        above = 0
        for name, whole, start, into in parts:
            if self.config.stacked:
                self._rows(f"{prefix}{stack}_proj.{kind}", sum(part[1] for part in parts), above + start, into)
            else:
                self._rows(f"{prefix}{name}_proj.{kind}", whole, start, into)
            above += whole

    def _vocabulary(self, name: str) -> Tensor:
        config = self.config
        rows = config.vocab_per_rank(self.size)
        start = min(self.rank * rows, config.vocab_size)
        stop = min(start + rows, config.vocab_size)
        into = torch.zeros(rows, config.hidden_size, dtype=self._dtype, device=self._device)
        self._rows(name, config.vocab_size, start, into[: stop - start])
        return into

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _norm(self, name: str, length: int, factor: float = 1.0) -> Tensor:
        """The weight of a norm: with what is added to it, so that kernels need not know of that.

        Some are in fp32 then: one and a bit, rounded to 16 bits, would be nearly another number.
        """
        dtype = torch.float32 if self.config.float32_norms else self._dtype
        into = torch.empty(length, dtype=dtype, device=self._device)
        self.moves.append(Move(f"{name}.weight", (length,), 0, 0, length, into, self.config.norm_shift, factor))
        return into

    def _whole(self, name: str, length: int) -> Tensor:
        into = self._empty(length)
        self._rows(name, length, 0, into)
        return into

    def _rows(self, name: str, whole: int, start: int, into: Tensor) -> None:
        """Fill `into` with rows `start` and on of a tensor that has `whole` rows."""
        self.moves.append(Move(name, (whole, *into.shape[1:]), 0, start, start + into.shape[0], into))

    def _columns(self, name: str, rows: int, whole: int) -> Tensor:
        """This rank's share of the columns."""
        into = self._empty(rows, whole // self.size)
        self._share(name, whole, into)
        return into

    def _share(self, name: str, whole: int, into: Tensor) -> None:
        """Fill `into` with this rank's columns of a tensor that has `whole` columns."""
        rows, count = into.shape
        self.moves.append(Move(name, (rows, whole), 1, self.rank * count, (self.rank + 1) * count, into))
