"""The states that layers carry for each request, of fixed size: how large they are, and the tensors they are.

A request's state lies at the place that its slot says; places behind those of all slots hold copies. Knows bytes and
shapes; whose copy is where, and when it is made, is the scheduler's matter.

Shape suffixes: L layers that carry states, S places, T tokens that a convolution looks back on, C its channels, H value
heads of this rank, D numbers of a key, V of a value.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tercet.model.blocks import Delta
from tercet.model.config import ModelConfig
from tercet.triton_kernels.copy_places import copy_places
from tercet.triton_kernels.delta_heads import GPU_DIM
from tercet.triton_kernels.delta_prefill import TILE


@dataclass(frozen=True)
class LayerState:
    """One layer's, of all places."""

    tails_STC: Tensor
    """What the last tokens brought to the convolution, the oldest first."""
    states_SHDV: Tensor
    """In fp32: they are added to for as long as a request lives."""


@dataclass(frozen=True)
class States:
    """All layers'."""

    tails_LSTC: Tensor
    states_LSHDV: Tensor

    def of_layer(self, index: int) -> LayerState:
        """`index`: among the layers that carry states."""
        return LayerState(self.tails_LSTC[index], self.states_LSHDV[index])

    def copy(self, pairs_P2: Tensor) -> None:
        """From one place to another, pair by pair: int32, on their device. No place that is copied to is in two."""
        copy_places(self.tails_LSTC, pairs_P2)
        copy_places(self.states_LSHDV, pairs_P2)

    @property
    def nbytes(self) -> int:
        return self.tails_LSTC.nbytes + self.states_LSHDV.nbytes


def held_by_layers(config: ModelConfig, kv_cache: Tensor, states: States | None) -> list[Tensor | LayerState]:
    """Each layer's cache, or its states."""
    if states is None:
        return list(kv_cache)
    caches, carried = iter(kv_cache), map(states.of_layer, itertools.count())
    return [next(caches) if config.delta_of(layer) is None else next(carried) for layer in range(config.num_layers)]


def state_tile(config: ModelConfig) -> int:
    """Of what positions chunks of prompts begin at multiples, so that states are the same however prompts are cut; 0:
    of any."""
    return 0 if config.delta is None else TILE


def check_for_gpu(delta: Delta) -> None:
    """ValueError names sizes that kernels do not know there."""
    for name, size in (("linear_key_head_dim", delta.key_dim), ("linear_value_head_dim", delta.value_dim)):
        if size != GPU_DIM:
            raise ValueError(f"config.json: {name} is {size}; supported on a GPU: {GPU_DIM}")


def num_places(max_num_seqs: int, kept_states: int) -> int:
    """Of all slots, of padding, and for copies."""
    return max_num_seqs + 1 + kept_states


def make_states(config: ModelConfig, places: int, dtype: torch.dtype, device: torch.device, size: int) -> States | None:
    """One of `size` ranks' part of them; None where no layer carries any. What is in them does not matter: a request
    begins from nothing. ValueError where a GPU has no memory for them."""
    if config.delta is None:
        return None
    num_layers, delta = len(config.delta.layers), config.delta.of_rank(size)
    tails = num_layers, places, delta.taps - 1, delta.channels
    states = num_layers, places, delta.value_heads, delta.key_dim, delta.value_dim
    num_bytes = math.prod(tails) * dtype.itemsize + math.prod(states) * torch.float32.itemsize
    if device.type == "cuda" and (free := torch.cuda.mem_get_info(device)[0]) < num_bytes:
        raise ValueError(
            f"{places} states take {num_bytes / 2**30:.1f} GiB, and {free / 2**30:.1f} are free: lower --max-num-seqs "
            "or --kept-states"
        )
    return States(
        torch.zeros(tails, dtype=dtype, device=device), torch.zeros(states, dtype=torch.float32, device=device)
    )
