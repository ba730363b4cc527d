"""The places of one rank's weights, and which slice of which checkpoint tensor fills each.

Knows the tensor names of the Hugging Face layout and how a matrix is cut for ranks; reads nothing (`weights.py`).

Shape suffixes as in `rank_weights.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tercet.model.blocks import Carried, Delta, Experts, Guesser, Heads, LayerInputs, Mamba
from tercet.model.config import ModelConfig
from tercet.model.delta_shard import delta_product, delta_weights
from tercet.model.expert_shard import expert_weights, weights_beside
from tercet.model.latent_shard import first_product, latent_weights
from tercet.model.mamba_shard import mamba_product, mamba_weights
from tercet.model.places import HeadsInPairs, Move, Places, Rows
from tercet.model.rank_weights import (
    ExpertWeights,
    GuesserWeights,
    InputWeights,
    LayerInputWeights,
    LayerWeights,
    MlpWeights,
    Weights,
)
from tercet.model.scaled_rows import Kept
from tercet.model.score_head import rows_of_head
from tercet.triton_kernels.scaled_weight import Weight

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
LAYERS = "model.layers."


def attention_name(carried: Carried | None) -> str:
    """What a layer's names call what it has in the place of attention, or that."""
    return "self_attn" if carried is None else "linear_attn" if isinstance(carried, Delta) else "mamba"


@dataclass(frozen=True)
class Part:
    """One of several projections in one matrix: its name, its rows in all, the first for this rank, how many it has."""

    name: str
    whole: int
    start: int
    count: int
    heads: HeadsInPairs | None = None
    """If they come in another order than they have here."""


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
        self.places = Places(config, rank, size, dtype, device, kept)

    @property
    def moves(self) -> Sequence[Move]:
        return self.places.moves

    def weights(self, interleaved: bool, tied: bool) -> Weights:
        embedding_VD = self.vocabulary(EMBEDDING)
        layers = tuple(
            self.layer(
                f"{LAYERS}{index}.",
                interleaved,
                self.config.layer_heads[index],
                self.config.carried_of(index),
                self.config.experts_of(index),
                bare=index in self.config.bare_layers,
            )
            for index in range(self.config.num_layers)
        )
        # Logits are linear in it. Real models divide them by powers of two: that rounds nothing.
        final_norm_D = self.places.norm("model.norm", self.config.hidden_size, 1 / self.config.logits_scaling)
        lm_head_VD = embedding_VD if tied else self.vocabulary(LM_HEAD)
        score = rows_of_head(self.config, EMBEDDING if tied else LM_HEAD)
        guesser = None if (one := self.config.guesser_read) is None else self._guesser(one, interleaved)
        rest = self._score(score), guesser, self._inputs()
        return Weights(embedding_VD, layers, final_norm_D, lm_head_VD, interleaved, *rest)

    def _inputs(self) -> InputWeights | None:
        if (told := self.config.layer_inputs) is None:
            return None
        places, hidden = self.places, self.config.hidden_size
        return InputWeights(
            table_VX=self.vocabulary("model.embed_tokens_per_layer.weight", told.width),
            made_XD=places.stacked([("model.per_layer_model_projection.weight", told.width, 0, told.width)], hidden),
            norm_P=places.numbers("model.per_layer_projection_norm.weight", told.size, factor=0.5**0.5),
        )

    def _layer_inputs(self, prefix: str, told: LayerInputs) -> LayerInputWeights:
        places, hidden = self.places, self.config.hidden_size
        return LayerInputWeights(
            gate_PD=places.stacked([(f"{prefix}per_layer_input_gate.weight", told.size, 0, told.size)], hidden),
            out_DP=places.stacked([(f"{prefix}per_layer_projection.weight", hidden, 0, hidden)], told.size),
            norm_D=places.norm(f"{prefix}post_per_layer_input_norm", hidden),
        )

    def _score(self, rows: Sequence[tuple[str, int, int]]) -> Tensor | None:
        score_LD = torch.empty(len(rows), self.config.hidden_size, dtype=torch.float64, device="cpu")
        for index, row in enumerate(rows):
            self.places.rows(*row, score_LD[index : index + 1])
        return score_LD if rows else None

    def _guesser(self, guesser: Guesser, interleaved: bool) -> GuesserWeights:
        places, hidden = self.places, self.config.hidden_size
        many = self.config.experts if guesser.has_experts else None
        return GuesserWeights(
            token_norm_D=places.norm(guesser.token_norm, hidden),
            hidden_norm_D=places.norm(guesser.hidden_norm, hidden),
            join_DE=places.stacked([(f"{guesser.join}.weight", hidden, 0, hidden)], 2 * hidden),
            layer=self.layer(guesser.layer, interleaved, self.config.heads, None, many),
            norm_D=places.norm(guesser.norm, hidden),
        )

    def layer(
        self, prefix: str, interleaved: bool, heads: Heads, carried: Carried | None, many: Experts | None, *,
        bare: bool = False,
    ) -> LayerWeights:  # fmt: skip
        """`prefix`: of its tensors' names; `carried`, `many`: what it has in place of keys and values, of one MLP;
        `bare`: it has no MLP."""
        config, places, hidden = self.config, self.places, self.config.hidden_size
        attention = f"{prefix}{attention_name(carried)}."
        heads_normed, norms = config.qk_norm and carried is None, config.norms
        names_behind = "query_layernorm", "key_layernorm"
        q_norm, k_norm = names_behind if config.qk_norm_behind else ("q_norm", "k_norm")
        return LayerWeights(
            input_norm_D=self._norm(prefix, norms.ahead_of_attention),
            qkv_ND=self._first_product(attention, heads, carried),
            qkv_bias_N=self._stacked_biases(attention, self.qkv(heads)) if config.qkv_bias else None,
            q_norm_H=places.norm(f"{attention}{q_norm}", heads.dim) if heads_normed else None,
            k_norm_H=places.norm(f"{attention}{k_norm}", heads.dim) if heads_normed and not heads.borrowed else None,
            qk_norm_J=self._wide_qk_norm(attention, heads) if config.wide_qk_norm else None,
            sinks_H=self._sinks(attention) if config.sinks else None,
            latent=latent_weights(places, config, attention) if config.latent else None,
            delta=delta_weights(places, carried, attention, hidden) if isinstance(carried, Delta) else None,
            mamba=mamba_weights(places, carried, attention) if isinstance(carried, Mamba) else None,
            o_DQ=places.columns(f"{attention}o_proj.weight", hidden, config.attended_dim(heads))
            if carried is None
            else places.columns(f"{attention}out_proj.weight", hidden, carried.value_heads * carried.value_dim),
            o_bias_D=places.whole(f"{attention}o_proj.bias", hidden) if config.o_bias else None,
            o_norm_D=self._norm(prefix, norms.behind_attention),
            post_norm_D=None if bare else self._norm(prefix, norms.ahead_of_mlp),
            mlp=None if bare else self._mlp(prefix, interleaved, many, config.mlp_size(heads)),
            beside=weights_beside(places, prefix, many, hidden) if many is not None and many.beside else None,
            inputs=self._layer_inputs(prefix, config.layer_inputs) if config.layer_inputs else None,
            down_norm_D=None if bare else self._norm(prefix, norms.behind_mlp),
            scale_1=places.numbers(f"{prefix}layer_scalar", 1) if config.layer_scales else None,
        )

    def _norm(self, prefix: str, name: str | None) -> Tensor | None:
        return None if name is None else self.places.norm(f"{prefix}{name}", self.config.hidden_size)

    def _first_product(self, prefix: str, heads: Heads, carried: Carried | None) -> Weight:
        config, hidden = self.config, self.config.hidden_size
        if isinstance(carried, Delta):
            return delta_product(self.places, carried, prefix, hidden)
        if isinstance(carried, Mamba):
            return mamba_product(self.places, carried, prefix, hidden)
        if config.latent is not None:
            return first_product(self.places, config, prefix)
        if config.gated_attention:
            return self.places.stacked(self.gated_rows(prefix, heads), hidden)
        return self._stacked(prefix, self.qkv(heads), 2 * hidden if config.joins else hidden)

    def gated_rows(self, prefix: str, heads: Heads) -> list[Rows]:
        """Of the first product where attention is gated. Of each head the rows for its gates follow those for its
        queries in the checkpoint; here they come last."""
        queries, *others = self.qkv(heads).parts
        size, name = heads.dim, f"{prefix}q_proj.weight"
        ends = range(2 * queries.start, 2 * (queries.start + queries.count), 2 * size)
        kinds = [[(name, 2 * queries.whole, head + turn * size, size) for head in ends] for turn in range(2)]
        middle = [(f"{prefix}{part.name}_proj.weight", part.whole, part.start, part.count) for part in others]
        return [*kinds[0], *middle, *kinds[1]]

    def _mlp(self, layer: str, interleaved: bool, many: Experts | None, size: int) -> MlpWeights | ExpertWeights:
        """`layer`: what its tensors' names begin with; `size`: of one MLP, of all ranks."""
        config, places, hidden = self.config, self.places, self.config.hidden_size
        if many is not None and not many.beside:
            return expert_weights(places, layer, many, hidden)
        prefix, gate_up = f"{layer}mlp.", self.gate_up(size)
        return MlpWeights(
            gate_up_2FD=self._stacked(prefix, gate_up, hidden, in_turns=interleaved),
            gate_up_bias_2F=self._stacked_biases(prefix, gate_up) if config.mlp_bias else None,
            down_DF=places.columns(f"{prefix}down_proj.weight", hidden, size),
            down_bias_D=places.whole(f"{prefix}down_proj.bias", hidden) if config.mlp_bias else None,
            curve_4=self._curve(f"{prefix}act_fn.") if config.activation == "xielu" else None,
        )

    def _curve(self, prefix: str) -> Tensor:
        into = torch.empty(4, dtype=torch.float32, device=self.places.device)
        self.places.rows(f"{prefix}alpha_p", 1, 0, into[:1])
        self.places.rows(f"{prefix}alpha_n", 1, 0, into[1:2])
        self.places.scalar(f"{prefix}beta", into[2:3])
        self.places.scalar(f"{prefix}eps", into[3:])
        return into

    def qkv(self, heads: Heads) -> Stack:
        """Where keys are values too, their rows are there twice: it is few rows, and no kernel need know of it."""
        (query, kv), config, pairs = self._head_rows(heads), self.config, None
        if config.turns_in_pairs:
            pairs = HeadsInPairs(heads.dim, config.rope.rotary_dim(heads.dim))
        first = Part("q", *query, pairs)
        if heads.borrowed:
            return Stack("q", (first,))
        value = Part("k" if heads.keys_are_values else "v", *kv)
        return Stack("qkv", (first, Part("k", *kv, pairs), value))

    def _wide_qk_norm(self, prefix: str, heads: Heads) -> Tensor:
        (q_whole, q_start, query), (k_whole, k_start, key) = self._head_rows(heads)
        into = self.places.empty(query + key)
        self.places.rows(f"{prefix}q_norm.weight", q_whole, q_start, into[:query])
        self.places.rows(f"{prefix}k_norm.weight", k_whole, k_start, into[query:])
        return into

    def _sinks(self, prefix: str) -> Tensor:
        num_heads = self.config.num_heads // self.size
        return self.places.numbers(f"{prefix}sinks", self.config.num_heads, self.rank * num_heads, num_heads)

    def _head_rows(self, heads: Heads) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Of q, then of k and v: how many rows there are in all, the first of this rank, and how many it has."""
        num_heads, dim = self.config.num_heads, heads.dim
        query, kv = num_heads // self.size * dim, heads.of_rank(self.size) * dim
        kv_start = self.rank * heads.count // self.size * dim
        return (num_heads * dim, self.rank * query, query), (heads.count * dim, kv_start, kv)

    def gate_up(self, whole: int) -> Stack:
        """`whole`: the MLP's size."""
        rows = whole, self.rank * (whole // self.size), whole // self.size
        up = Part("up", *rows)
        has_gate = self.config.activation in ("silu", "gelu")
        return Stack("gate_up", (Part("gate", *rows), up)) if has_gate else Stack("up", (up,))

    def _stacked(self, prefix: str, stack: Stack, columns: int, *, in_turns: bool = False) -> Weight:
        """`in_turns`: a row of each, and so on."""
        names = [stack.name] if self._is_one(stack) else [part.name for part in stack.parts]
        into = self.places.matrix([f"{prefix}{name}_proj.weight" for name in names], stack.count, columns, columns)
        self._projections(prefix, "weight", stack, into, in_turns=in_turns)
        return into

    def _stacked_biases(self, prefix: str, stack: Stack) -> Tensor:
        into = self.places.empty(stack.count)
        self._projections(prefix, "bias", stack, into)
        return into

    def _projections(self, prefix: str, kind: str, stack: Stack, into: Weight, *, in_turns: bool = False) -> None:
        """Fill it from tensors by the parts' names, or from one in which they are on top of each other: ranks share
        each of them then, too."""
        first = above = 0
        for index, part in enumerate(stack.parts):
            place = into[index :: len(stack.parts)] if in_turns else into[first : first + part.count]
            if self._is_one(stack):
                whole = sum(each.whole for each in stack.parts)
                self.places.rows(f"{prefix}{stack.name}_proj.{kind}", whole, above + part.start, place, part.heads)
            else:
                self.places.rows(f"{prefix}{part.name}_proj.{kind}", part.whole, part.start, place, part.heads)
            first += part.count
            above += part.whole

    def _is_one(self, stack: Stack) -> bool:
        """Whether the checkpoint has it as one tensor."""
        return stack.name in self.config.stacked

    def vocabulary(self, name: str, width: int | None = None) -> Tensor:
        """This rank's rows, and behind the last rank's zeros. `width`: numbers of a row; None: of the stream's."""
        config = self.config
        rows = config.vocab_per_rank(self.size)
        start = min(self.rank * rows, config.vocab_size)
        stop = min(start + rows, config.vocab_size)
        into = torch.zeros(rows, width or config.hidden_size, dtype=self.places.dtype, device=self.places.device)
        self.places.rows(name, config.vocab_size, start, into[: stop - start])
        return into
