"""The states that layers carry for each request, of fixed size: how large they are, and the tensors they are.

A request's state lies at the place that its slot says; places behind those of all slots hold copies. Knows bytes and
shapes; whose copy is where, and when it is made, is the scheduler's matter. A state cannot be taken back: where tokens
are tried, layers leave what they make of those, and when it is known which hold, all states move on at once.

Shape suffixes: L layers that carry states, S places, T tokens that a convolution looks back on, or that are tried; C
its channels, H value heads of this rank, D numbers of a key, V of a value.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tercet.model.blocks import Carried, Delta
from tercet.model.config import ModelConfig
from tercet.model.step_shape import round_up
from tercet.triton_kernels.copy_places import copy_places
from tercet.triton_kernels.delta_heads import GPU_DIM, GPU_SIZES
from tercet.triton_kernels.delta_prefill import TILE
from tercet.triton_kernels.delta_settle import delta_settle
from tercet.triton_kernels.tried_tokens import TriedTokens


@dataclass(frozen=True)
class LayerTries:
    """What a layer leaves of the tokens of a step that tries some, or room for more."""

    inputs_TC: Tensor
    """What they bring to the convolution."""
    qkv_TC: Tensor
    gates_T2H: Tensor
    """In fp32: log decays, then betas or time steps."""

    def cut(self, num_tokens: int) -> "LayerTries":
        """Of a step with so many."""
        return LayerTries(self.inputs_TC[:num_tokens], self.qkv_TC[:num_tokens], self.gates_T2H[:num_tokens])


@dataclass(frozen=True)
class Tries:
    """All layers' room for it."""

    inputs_LTC: Tensor
    qkv_LTC: Tensor
    gates_LT2H: Tensor
    corrects: bool = True
    """By which rule states move on: the gated delta rule, or Mamba-2's."""

    def of_layer(self, index: int) -> LayerTries:
        return LayerTries(self.inputs_LTC[index], self.qkv_LTC[index], self.gates_LT2H[index])


@dataclass(frozen=True)
class LayerState:
    """One layer's, of all places."""

    tails_STC: Tensor
    """What the last tokens brought to the convolution, the oldest first."""
    states_SHDV: Tensor
    """Added to for as long as a request lives: in fp32, unless somebody wants less."""
    tries: LayerTries | None = None
    """Where tokens are tried."""


@dataclass(frozen=True)
class States:
    """All layers'."""

    tails_LSTC: Tensor
    states_LSHDV: Tensor
    tries: Tries | None = None

    def of_layer(self, index: int) -> LayerState:
        """`index`: among the layers that carry states."""
        tries = None if self.tries is None else self.tries.of_layer(index)
        return LayerState(self.tails_LSTC[index], self.states_LSHDV[index], tries)

    def settle(self, tried: TriedTokens, known_S: Tensor) -> None:
        """At the end of a step that tried tokens, by which slots are as long as `known_S` says: move on by those that
        hold. Behind all layers, which have left what they made of them."""
        assert self.tries is not None
        _, _, value_heads, key_dim, value_dim = self.states_LSHDV.shape
        num_key_heads = (self.tails_LSTC.shape[-1] - value_heads * value_dim) // (2 * key_dim)
        left = self.tries.inputs_LTC, self.tries.qkv_LTC, self.tries.gates_LT2H
        delta_settle(
            *left, self.tails_LSTC, self.states_LSHDV, tried, known_S,
            num_key_heads=num_key_heads, corrects=self.tries.corrects,
        )  # fmt: skip

    def copy(self, pairs_P2: Tensor) -> None:
        """From one place to another, pair by pair: int32, on their device. No place that is copied to is in two."""
        copy_places(self.tails_LSTC, pairs_P2)
        copy_places(self.states_LSHDV, pairs_P2)

    @property
    def nbytes(self) -> int:
        return self.tails_LSTC.nbytes + self.states_LSHDV.nbytes


def held_by_layers(config: ModelConfig, kv_cache: Sequence[Tensor], states: States | None) -> list[Tensor | LayerState]:
    """Each layer's part of the cache, or its states."""
    if states is None:
        return list(kv_cache)
    caches, carried = iter(kv_cache), map(states.of_layer, itertools.count())
    return [next(caches) if config.carried_of(layer) is None else next(carried) for layer in range(config.num_layers)]


def state_tile(config: ModelConfig) -> int:
    """Of what positions chunks of prompts begin at multiples, so that states are the same however prompts are cut; 0:
    of any."""
    return 0 if config.carried is None else TILE


def check_for_gpu(carried: Carried) -> None:
    """ValueError names sizes that kernels do not know there."""
    names = ("linear_key_head_dim", "linear_value_head_dim")
    known: tuple[tuple[int, ...], ...] = (GPU_DIM,), (GPU_DIM,)
    if not isinstance(carried, Delta):
        names, known = ("the size of a Mamba state", "the size of a Mamba head"), GPU_SIZES
    for name, size, sizes in zip(names, (carried.key_dim, carried.value_dim), known, strict=True):
        if size not in sizes:
            raise ValueError(f"config.json: {name} is {size}; supported on a GPU: {', '.join(map(str, sizes))}")


def num_places(max_num_seqs: int, kept_states: int) -> int:
    """Of all slots, of padding, and for copies."""
    return max_num_seqs + 1 + kept_states


def make_states(
    config: ModelConfig, places: int, dtype: torch.dtype, device: torch.device, size: int, most_tried: int = 0
) -> States | None:
    """One of `size` ranks' part of them; None where no layer carries any. What is in them does not matter: a request
    begins from nothing. `most_tried`: tokens of a step that tries some, at most, if there are such steps. ValueError
    where a GPU has no memory for them."""
    if config.carried is None:
        return None
    num_layers, own = len(config.carried.layers), config.carried.of_rank(size)
    tails = num_layers, places, own.taps - 1, own.channels
    states = num_layers, places, own.value_heads, own.key_dim, own.value_dim
    room = round_up(most_tried, 4)  # aligned to 16 bytes in each layer, or kernels would compile once more
    tried, gates = (num_layers, room, own.channels), (num_layers, room, 2 * own.value_heads)
    state_dtype: torch.dtype = getattr(torch, own.state_dtype)
    num_bytes = (math.prod(tails) + 2 * math.prod(tried)) * dtype.itemsize
    num_bytes += math.prod(states) * state_dtype.itemsize + math.prod(gates) * torch.float32.itemsize
    if device.type == "cuda" and (free := torch.cuda.mem_get_info(device)[0]) < num_bytes:
        what, ways = f"{places} states", "--max-num-seqs or --kept-states"
        if state_dtype == torch.float32:
            ways = f"{ways}, or want --state-dtype bfloat16"
        if room:
            what, ways = f"{what} and room for {room} tokens that are tried", f"{ways}, or try fewer"
        raise ValueError(f"{what} take {num_bytes / 2**30:.1f} GiB, and {free / 2**30:.1f} are free: lower {ways}")

    def zeros(shape: tuple[int, ...], of: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=of, device=device)

    tries = None
    if room:
        corrects = isinstance(own, Delta)
        tries = Tries(zeros(tried, dtype), zeros(tried, dtype), zeros(gates, torch.float32), corrects)
    return States(zeros(tails, dtype), zeros(states, state_dtype), tries)
