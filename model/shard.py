"""The places of one rank's weights, and which slice of which checkpoint tensor fills each.

Knows the tensor names of the Hugging Face layout and how a matrix is cut for ranks; reads nothing (`weights.py`).

Shape suffixes as in `rank_weights.py`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tercet.model.config import Experts, ModelConfig
from tercet.model.empty_matrix import empty_matrix
from tercet.model.rank_weights import ExpertWeights, LayerWeights, MlpWeights, Weights
from tercet.model.scaled_rows import Kept
from tercet.model.score_head import rows_of_head
from tercet.triton_kernels.scaled_weight import Weight

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
LAYERS = "model.layers."


@dataclass(frozen=True)
class Move:
    """Copy slice `start:stop` of dimension `dim` of tensor `name` (whole shape `shape`) into `into`.

    `shift` is added to the numbers first, and then they are multiplied by `factor`. `rest`: what the type of `into`
    leaves of the numbers when they are rounded to it.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int
    into: Weight
    shift: float = 0.0
    factor: float = 1.0
    rest: bool = False

    def changed(self, piece: Tensor) -> Tensor:
        """What goes into `into` for a piece of what was read: in fp32, to be rounded once."""
        if self.rest:
            return piece.float() - piece.to(self.into.dtype).float()
        if self.shift == 0 and self.factor == 1:
            return piece
        return (piece.float() + self.shift) * self.factor


@dataclass(frozen=True)
class Part:
    """One of several projections in one matrix: its name, its rows in all, the first for this rank, how many it has."""

    name: str
    whole: int
    start: int
    count: int


@dataclass(frozen=True)
class Stack:
    """Projections of the same numbers, whose rows lie on top of each other. `name`: what they are called together."""

    name: str
    parts: tuple[Part, ...]

    @property
    def count(self) -> int:
        """Rows of this rank."""
        return sum(part.count for part in self.parts)


class ShardBuilder:
    """Allocates one rank's tensors and writes down in `moves` how each is filled."""

    def __init__(
        self, config: ModelConfig, rank: int, size: int, dtype: torch.dtype, device: torch.device, kept: Kept
    ) -> None:
        """`kept`: what is, as it is stored, if the matrix that it goes into can be so."""
        self.config = config
        self.rank = rank
        self.size = size
        self.moves: list[Move] = []
        self._dtype, self._device, self._kept = dtype, device, kept

    def weights(self, interleaved: bool, tied: bool) -> Weights:
        embedding_VD = self._vocabulary(EMBEDDING)
        layers = tuple(self._layer(index, interleaved) for index in range(self.config.num_layers))
        # Logits are linear in it. Real models divide them by powers of two: that rounds nothing.
        final_norm_D = self._norm("model.norm", self.config.hidden_size, 1 / self.config.logits_scaling)
        lm_head_VD = embedding_VD if tied else self._vocabulary(LM_HEAD)
        score = rows_of_head(self.config, EMBEDDING if tied else LM_HEAD)
        return Weights(embedding_VD, layers, final_norm_D, lm_head_VD, interleaved, self._score(score))

    def _score(self, rows: Sequence[tuple[str, int, int]]) -> Tensor | None:
        score_LD = torch.empty(len(rows), self.config.hidden_size, dtype=torch.float64, device="cpu")
        for index, row in enumerate(rows):
            self._rows(*row, score_LD[index : index + 1])
        return score_LD if rows else None

    def _layer(self, index: int, interleaved: bool) -> LayerWeights:
        config, hidden = self.config, self.config.hidden_size
        prefix = f"{LAYERS}{index}."
        attention = f"{prefix}self_attn."
        qkv = self.qkv()
        many = config.experts_of(index)
        # Where blocks have norms behind them, the usual name of the one ahead of the MLP is that behind attention.
        behind = config.block_norms
        ahead_of_mlp = "pre_feedforward_layernorm" if behind else "post_attention_layernorm"
        return LayerWeights(
            input_norm_D=self._norm(f"{prefix}input_layernorm", hidden) if config.input_norms else None,
            qkv_ND=self._stacked(attention, qkv, hidden),
            qkv_bias_N=self._stacked_biases(attention, qkv) if config.qkv_bias else None,
            q_norm_H=self._norm(f"{attention}q_norm", config.head_dim) if config.qk_norm else None,
            k_norm_H=self._norm(f"{attention}k_norm", config.head_dim) if config.qk_norm else None,
            qk_norm_J=self._wide_qk_norm(attention) if config.wide_qk_norm else None,
            sinks_H=self._sinks(attention) if config.sinks else None,
            o_DQ=self._columns(f"{attention}o_proj.weight", hidden, config.num_heads * config.head_dim),
            o_bias_D=self._whole(f"{attention}o_proj.bias", hidden) if config.o_bias else None,
            o_norm_D=self._norm(f"{prefix}post_attention_layernorm", hidden) if behind else None,
            post_norm_D=self._norm(f"{prefix}{ahead_of_mlp}", hidden) if config.input_norms else None,
            mlp=self._mlp(f"{prefix}mlp.", interleaved) if many is None else self._experts(prefix, many),
            down_norm_D=self._norm(f"{prefix}post_feedforward_layernorm", hidden) if behind else None,
        )

    def _mlp(self, prefix: str, interleaved: bool) -> MlpWeights:
        config, hidden = self.config, self.config.hidden_size
        gate_up = self.gate_up()
        return MlpWeights(
            gate_up_2FD=self._stacked(prefix, gate_up, hidden, in_turns=interleaved),
            gate_up_bias_2F=self._stacked_biases(prefix, gate_up) if config.mlp_bias else None,
            down_DF=self._columns(f"{prefix}down_proj.weight", hidden, config.intermediate_size),
            down_bias_D=self._whole(f"{prefix}down_proj.bias", hidden) if config.mlp_bias else None,
        )

    def _experts(self, prefix: str, experts: Experts) -> ExpertWeights:
        hidden, whole, names = self.config.hidden_size, experts.intermediate_size, experts.names
        part = whole // self.size
        start = self.rank * part
        # Whose matrices each expert's are part of, their size there, and where they begin.
        block = f"{prefix}{names.block}."
        places = [(f"{block}experts.{index}.", whole, start) for index in range(experts.count)]
        shared, size = f"{block}{names.shared}.", experts.shared * whole
        places += [(shared, size, first + start) for first in range(0, size, whole)]
        rows_of = (names.gate_up,) if names.gate_up else (names.gate, names.up)
        both = {f"{name}{each}.weight" for name, _, _ in places for each in rows_of}
        downs = {f"{name}{names.down}.weight" for name, _, _ in places}
        gate_up_RD = self._matrix(both, experts.all * 2 * part, hidden, hidden)
        down_RF = self._matrix(downs, experts.all * hidden, part, whole)
        for index, (name, size, first) in enumerate(places):
            gate_up = gate_up_RD[index * 2 * part : (index + 1) * 2 * part]
            for turn, each in enumerate(rows_of):
                turns = gate_up[turn :: len(rows_of)]
                self._rows(f"{name}{each}.weight", 2 * size // len(rows_of), 2 * first // len(rows_of), turns)
            down = down_RF[index * hidden : (index + 1) * hidden]
            self._some_columns(f"{name}{names.down}.weight", size, first, down)
        gate_up_E2FD, down_EDF = (
            matrix.view(experts.all, -1, matrix.shape[1]) if isinstance(matrix, Tensor) else matrix
            for matrix in (gate_up_RD, down_RF)
        )
        router_LD, bias_E = self._router(block, experts)
        if experts.clamp is None:
            return ExpertWeights(router_LD, None, bias_E, gate_up_E2FD, None, down_EDF, None)
        gate_up_bias_E2F = self._empty(experts.count, 2 * part)
        self._share(f"{block}experts.{names.gate_up}_bias", 2 * whole, gate_up_bias_E2F)
        down_bias_ED = self._empty(experts.count, hidden)
        self._rows(f"{block}experts.{names.down}_bias", experts.count, 0, down_bias_ED)
        router_bias_L = self._whole(f"{block}{names.router}.bias", experts.count)
        return ExpertWeights(
            router_LD, router_bias_L, bias_E, gate_up_E2FD, gate_up_bias_E2F, down_EDF, down_bias_ED
        )  # fmt: skip

    def _router(self, block: str, experts: Experts) -> tuple[Tensor, Tensor | None]:
        """And the bias that it chooses with."""
        name, count, hidden = f"{block}{experts.names.router}.weight", experts.count, self.config.hidden_size
        paired = experts.biased and self._dtype.itemsize == 2
        router_LD = self._empty(count * (1 + paired) + experts.shared_gated, hidden)
        self._rows(name, count, 0, router_LD[:count])
        if experts.shared_gated:
            self._rows(f"{block}{experts.names.shared}_gate.weight", 1, 0, router_LD[count:])
        if not experts.biased:
            return router_LD, None
        if paired:  # some files have it in fp32
            self.moves.append(Move(name, (count, hidden), 0, 0, count, router_LD[count:], rest=True))
        bias_E = torch.empty(count, dtype=torch.float32, device=self._device)
        self._rows(f"{block}{experts.names.bias}", count, 0, bias_E)
        return router_LD, bias_E

    def qkv(self) -> Stack:
        query, kv = self._head_rows()
        return Stack("qkv", (Part("q", *query), Part("k", *kv), Part("v", *kv)))

    def _wide_qk_norm(self, prefix: str) -> Tensor:
        (q_whole, q_start, query), (k_whole, k_start, key) = self._head_rows()
        into = self._empty(query + key)
        self._rows(f"{prefix}q_norm.weight", q_whole, q_start, into[:query])
        self._rows(f"{prefix}k_norm.weight", k_whole, k_start, into[query:])
        return into

    def _sinks(self, prefix: str) -> Tensor:
        num_heads = self.config.num_heads // self.size
        into = torch.empty(num_heads, dtype=torch.float32, device=self._device)
        self._rows(f"{prefix}sinks", self.config.num_heads, self.rank * num_heads, into)
        return into

    def _head_rows(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Of q, then of k and v: how many rows there are in all, the first of this rank, and how many it has."""
        config, head_dim = self.config, self.config.head_dim
        query = config.num_heads // self.size * head_dim
        kv = config.kv_heads_per_rank(self.size) * head_dim
        # With fewer KV heads than ranks, neighbouring ranks hold the same head.
        kv_start = self.rank * config.num_kv_heads // self.size * head_dim
        return (config.num_heads * head_dim, self.rank * query, query), (config.num_kv_heads * head_dim, kv_start, kv)

    def gate_up(self) -> Stack:
        whole = self.config.intermediate_size
        rows = whole, self.rank * (whole // self.size), whole // self.size
        return Stack("gate_up", (Part("gate", *rows), Part("up", *rows)))

    def _stacked(self, prefix: str, stack: Stack, columns: int, *, in_turns: bool = False) -> Weight:
        """`in_turns`: a row of each, and so on."""
        names = [stack.name] if self.config.stacked else [part.name for part in stack.parts]
        into = self._matrix([f"{prefix}{name}_proj.weight" for name in names], stack.count, columns, columns)
        self._projections(prefix, "weight", stack, into, in_turns=in_turns)
        return into

    def _stacked_biases(self, prefix: str, stack: Stack) -> Tensor:
        into = self._empty(stack.count)
        self._projections(prefix, "bias", stack, into)
        return into

    def _projections(self, prefix: str, kind: str, stack: Stack, into: Weight, *, in_turns: bool = False) -> None:
        """Fill it from tensors by the parts' names, or from one in which they are on top of each other: ranks share
        each of them then, too."""
        first = above = 0
        for index, part in enumerate(stack.parts):
            place = into[index :: len(stack.parts)] if in_turns else into[first : first + part.count]
            if self.config.stacked:
                whole = sum(each.whole for each in stack.parts)
                self._rows(f"{prefix}{stack.name}_proj.{kind}", whole, above + part.start, place)
            else:
                self._rows(f"{prefix}{part.name}_proj.{kind}", part.whole, part.start, place)
            first += part.count
            above += part.whole

    def _vocabulary(self, name: str) -> Tensor:
        config = self.config
        rows = config.vocab_per_rank(self.size)
        start = min(self.rank * rows, config.vocab_size)
        stop = min(start + rows, config.vocab_size)
        into = torch.zeros(rows, config.hidden_size, dtype=self._dtype, device=self._device)
        self._rows(name, config.vocab_size, start, into[: stop - start])
        return into

    def _matrix(self, names: Iterable[str], rows: int, columns: int, whole: int) -> Weight:
        """A place for `columns` columns, of `whole` that these tensors have: kept as stored if all of them are so in
        one way, and neither a group nor what products read at once is cut."""
        ways = {self._kept.get(name) for name in names}
        way = ways.pop() if len(ways) == 1 else None
        return empty_matrix(way, rows, columns, whole, self._dtype, self._device)

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

    def _rows(self, name: str, whole: int, start: int, into: Weight) -> None:
        """Fill `into` with rows `start` and on of a tensor that has `whole` rows."""
        self.moves.append(Move(name, (whole, *into.shape[1:]), 0, start, start + into.shape[0], into))

    def _columns(self, name: str, rows: int, whole: int) -> Weight:
        """This rank's share of the columns."""
        into = self._matrix([name], rows, whole // self.size, whole)
        self._share(name, whole, into)
        return into

    def _share(self, name: str, whole: int, into: Weight) -> None:
        """Fill `into` with this rank's columns of a tensor that has `whole` columns."""
        self._some_columns(name, whole, self.rank * into.shape[1], into)

    def _some_columns(self, name: str, whole: int, start: int, into: Weight) -> None:
        """Fill `into` with columns `start` and on of a tensor that has `whole` columns."""
        rows, count = into.shape
        self.moves.append(Move(name, (rows, whole), 1, start, start + count, into))
