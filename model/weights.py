"""A rank's weights: which slice of which checkpoint tensor goes where, and the reading of them.

Knows the tensor names of the Hugging Face layout; where tensors come from is a `Checkpoint` (`safetensors_files.py`,
`gguf_file.py`, or random numbers from `dummy.py`). Only this rank's slices are read, each straight to its place.

Shape suffixes: V vocabulary rows of this rank, D hidden size, N q, k and v rows of this rank together, Q q rows of
this rank, F intermediate size of this rank.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from tercet.model.config import ModelConfig
from tercet.model.linear import reorder_for_cpu

Progress = Callable[[int, int], None]
"""Called with bytes read and bytes to read, of this rank."""

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
_READERS = 4
"""Threads that read at a time: page faults, dequantizing and copies to the device overlap."""


class Checkpoint(Protocol):
    """Named tensors, wherever they lie."""

    @property
    def source(self) -> str:
        """What messages call it."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor it holds."""
        ...

    def read(self, name: str, dim: int, start: int, stop: int) -> Iterator[Tensor]:
        """Slice `start:stop` of dimension `dim`, in the checkpoint's own type, on any device: some rows at a time.

        What comes is good until the thread reads on.
        """
        ...


@dataclass(frozen=True)
class LayerWeights:
    """One layer. `gate_up_2FD`: gate rows then up rows, or in turns where `Weights.interleaved` says so."""

    input_norm_D: Tensor
    qkv_ND: Tensor
    qkv_bias_N: Tensor | None
    q_norm_H: Tensor | None
    k_norm_H: Tensor | None
    o_DQ: Tensor
    o_bias_D: Tensor | None
    post_norm_D: Tensor
    gate_up_2FD: Tensor
    gate_up_bias_2F: Tensor | None
    down_DF: Tensor
    down_bias_D: Tensor | None


@dataclass(frozen=True)
class Weights:
    """All of one rank. `lm_head_VD` is the embedding itself where the two are tied."""

    embedding_VD: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_D: Tensor
    lm_head_VD: Tensor
    interleaved: bool


@dataclass(frozen=True)
class _Move:
    """Copy slice `start:stop` of dimension `dim` of tensor `name` (whole shape `shape`) into `into`."""

    name: str
    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int
    into: Tensor


def empty_weights(
    config: ModelConfig, *, rank: int, size: int, dtype: torch.dtype, device: torch.device, interleaved: bool
) -> Weights:
    """This rank's weights as `load_weights` allocates them."""
    config.check_tensor_parallel(size)
    builder = _Builder(config, rank, size, dtype, device)
    return builder.weights(interleaved and not config.mlp_bias, config.tie_word_embeddings)


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    rank: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    interleaved: bool = False,
    progress: Progress | None = None,
) -> Weights:
    """Allocate this rank's weights and fill them. ValueError names tensors that are missing, surplus or misshapen.

    `interleaved`: gate and up rows in turns, as the fused SiLU product wants them; not where they have a bias, which
    that product does not take.
    """
    interleaved = interleaved and not config.mlp_bias
    config.check_tensor_parallel(size)
    shapes = checkpoint.shapes()
    # Some files hold both although config.json ties them: as in transformers, they count as tied only when equal.
    tied = config.tie_word_embeddings and LM_HEAD not in shapes
    builder = _Builder(config, rank, size, dtype, device)
    weights = builder.weights(interleaved, tied)
    moves = builder.moves
    _check_names(checkpoint.source, {move.name: move.shape for move in moves}, shapes)
    total = sum(move.into.nbytes for move in moves)
    done = 0
    if progress is not None:
        progress(done, total)

    def carry_out(move: _Move) -> int:
        if move.start < move.stop:  # the last rank may have nothing but padding
            row = 0
            for piece in checkpoint.read(move.name, move.dim, move.start, move.stop):
                # To the device first, then to the type: the device converts faster.
                move.into[row : row + len(piece)].copy_(piece.to(move.into.device))
                row += len(piece)
            assert row == len(move.into)
        return move.into.nbytes

    with ThreadPoolExecutor(_READERS) as readers:
        for num_bytes in readers.map(carry_out, moves):
            done += num_bytes
            if progress is not None:
                progress(done, total)
    if config.tie_word_embeddings and not tied and torch.equal(weights.embedding_VD, weights.lm_head_VD):
        return Weights(weights.embedding_VD, weights.layers, weights.final_norm_D, weights.embedding_VD, interleaved)
    return weights


def reordered_for_cpu(weights: Weights) -> Weights:
    """The same weights, the matrices of products in the order the CPU reads fastest; on a GPU as they are.

    What was given is used up: each matrix gives its memory back before the next one's copy is made.
    """
    layers = tuple(
        replace(
            layer,
            qkv_ND=_reordered(layer.qkv_ND),
            o_DQ=_reordered(layer.o_DQ),
            gate_up_2FD=layer.gate_up_2FD if weights.interleaved else _reordered(layer.gate_up_2FD),
            down_DF=_reordered(layer.down_DF),
        )
        for layer in weights.layers
    )
    tied = weights.lm_head_VD is weights.embedding_VD
    lm_head_VD = reorder_for_cpu(weights.lm_head_VD) if tied else _reordered(weights.lm_head_VD)
    return replace(weights, layers=layers, lm_head_VD=lm_head_VD)


def _reordered(weight: Tensor) -> Tensor:
    reordered = reorder_for_cpu(weight)
    if reordered is not weight:
        weight.untyped_storage().resize_(0)  # others still hold the tensor
    return reordered


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this model holds."""
    builder = _Builder(config, 0, 1, torch.float32, torch.device("meta"))
    builder.weights(interleaved=False, tied=config.tie_word_embeddings)
    return {move.name: move.shape for move in builder.moves}


def _check_names(source: str, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    problems = []
    if missing := [name for name in expected if name not in found]:
        problems.append(f"missing: {_some(missing)}")
    # Old Llama files carry the rotary frequencies, which follow from config.json.
    surplus = [name for name in found if name not in expected and not name.endswith("rotary_emb.inv_freq")]
    if surplus:
        problems.append(f"not part of this model: {_some(surplus)}")
    wrong = [
        f"{n} {list(found[n])} (want {list(shape)})" for n, shape in expected.items() if found.get(n, shape) != shape
    ]
    if wrong:
        problems.append(f"of the wrong shape: {_some(wrong)}")
    if problems:
        raise ValueError(f"{source}: tensors {'; tensors '.join(problems)}")


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


class _Builder:
    """Allocates one rank's tensors and writes down in `moves` how each is filled."""

    def __init__(self, config: ModelConfig, rank: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.rank = rank
        self.size = size
        self.moves: list[_Move] = []
        self._dtype = dtype
        self._device = device

    def weights(self, interleaved: bool, tied: bool) -> Weights:
        embedding_VD = self._vocabulary(EMBEDDING)
        layers = tuple(self._layer(f"model.layers.{i}.", interleaved) for i in range(self.config.num_layers))
        final_norm_D = self._whole("model.norm.weight", self.config.hidden_size)
        lm_head_VD = embedding_VD if tied else self._vocabulary(LM_HEAD)
        return Weights(embedding_VD, layers, final_norm_D, lm_head_VD, interleaved)

    def _layer(self, prefix: str, interleaved: bool) -> LayerWeights:
        config, hidden = self.config, self.config.hidden_size
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return LayerWeights(
            input_norm_D=self._whole(f"{prefix}input_layernorm.weight", hidden),
            qkv_ND=self._qkv(attention, "weight", hidden),
            qkv_bias_N=self._qkv(attention, "bias") if config.qkv_bias else None,
            q_norm_H=self._whole(f"{attention}q_norm.weight", config.head_dim) if config.qk_norm else None,
            k_norm_H=self._whole(f"{attention}k_norm.weight", config.head_dim) if config.qk_norm else None,
            o_DQ=self._columns(f"{attention}o_proj.weight", hidden, config.num_heads * config.head_dim),
            o_bias_D=self._whole(f"{attention}o_proj.bias", hidden) if config.o_bias else None,
            post_norm_D=self._whole(f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up_2FD=self._gate_up(mlp, "weight", interleaved, hidden),
            gate_up_bias_2F=self._gate_up(mlp, "bias", False) if config.mlp_bias else None,
            down_DF=self._columns(f"{mlp}down_proj.weight", hidden, config.intermediate_size),
            down_bias_D=self._whole(f"{mlp}down_proj.bias", hidden) if config.mlp_bias else None,
        )

    def _qkv(self, prefix: str, kind: str, *inputs: int) -> Tensor:
        config, head_dim = self.config, self.config.head_dim
        query = config.num_heads // self.size * head_dim
        kv = config.kv_heads_per_rank(self.size) * head_dim
        # With fewer KV heads than ranks, neighbouring ranks hold the same head.
        kv_start = self.rank * config.num_kv_heads // self.size * head_dim
        into = self._empty(query + 2 * kv, *inputs)
        self._rows(f"{prefix}q_proj.{kind}", config.num_heads * head_dim, self.rank * query, into[:query])
        self._rows(f"{prefix}k_proj.{kind}", config.num_kv_heads * head_dim, kv_start, into[query : query + kv])
        self._rows(f"{prefix}v_proj.{kind}", config.num_kv_heads * head_dim, kv_start, into[query + kv :])
        return into

    def _gate_up(self, prefix: str, kind: str, interleaved: bool, *inputs: int) -> Tensor:
        whole = self.config.intermediate_size
        part = whole // self.size
        into = self._empty(2 * part, *inputs)
        gate, up = (into[0::2], into[1::2]) if interleaved else (into[:part], into[part:])
        self._rows(f"{prefix}gate_proj.{kind}", whole, self.rank * part, gate)
        self._rows(f"{prefix}up_proj.{kind}", whole, self.rank * part, up)
        return into

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

    def _whole(self, name: str, length: int) -> Tensor:
        into = self._empty(length)
        self._rows(name, length, 0, into)
        return into

    def _rows(self, name: str, whole: int, start: int, into: Tensor) -> None:
        """Fill `into` with rows `start` and on of a tensor that has `whole` rows."""
        self.moves.append(_Move(name, (whole, *into.shape[1:]), 0, start, start + into.shape[0], into))

    def _columns(self, name: str, rows: int, whole: int) -> Tensor:
        """This rank's share of the columns."""
        count = whole // self.size
        into = self._empty(rows, count)
        self.moves.append(_Move(name, (rows, whole), 1, self.rank * count, (self.rank + 1) * count, into))
        return into
