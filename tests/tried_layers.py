"""Layers that carry states in a step that tries tokens: stacked pools, what is left, and plain steps beside it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from delta_layers import DeltaLayer
from mamba_layers import MambaLayer
from tercet.model.states import States, Tries
from tercet.triton_kernels.tried_tokens import TriedTokens

NAN = float("nan")


class TriedLayers:
    """Of a model. `slots`: of each slot of the step which it is, its length at its first token, how many it tries."""

    def __init__(
        self,
        layers: Sequence[DeltaLayer | MambaLayer],
        places: int,
        slots: list[tuple[int, int, int]],
        each: int,
        kept_in: torch.dtype = torch.float32,
    ) -> None:
        self.layers, self.slots, self.each = layers, slots, each
        one, room = layers[0], len(slots) * each + 3
        for layer in layers:
            if isinstance(layer, DeltaLayer):
                layer.rates_apart = each == 1
        self.tokens = [layer.tokens(len(slots) * each) for layer in layers]
        lengths = [length + place if place < count else 0 for _, length, count in slots for place in range(each)]
        whose = [slot for slot, _, _ in slots for _ in range(each)]
        self.tried = TriedTokens(one.ints(*whose), one.ints(*lengths), each)
        pools = [layer.pools(places, kept_in) for layer in layers]
        tails, states = (torch.stack([pool[part] for pool in pools]) for part in range(2))
        for slot, length, _ in slots:
            if length == 1:  # what a former holder has left
                tails[:, slot] = states[:, slot] = NAN
        for x in self.tokens:
            x[self.tried.lengths_T == 0] = NAN

        def rubbish(columns: int, dtype: torch.dtype) -> Tensor:
            return torch.full((len(layers), room, columns), NAN, dtype=dtype, device=one.device)

        inputs, qkv = (rubbish(one.channels, one.dtype) for _ in range(2))
        left = Tries(inputs, qkv, rubbish(2 * one.H, torch.float32), corrects=isinstance(one, DeltaLayer))
        self.states = States(tails, states, left)

    def run(self) -> list[Tensor]:
        """Each layer's answers."""
        outs = []
        for index, layer in enumerate(self.layers):
            held = self.states.of_layer(index)
            assert held.tries is not None
            left, x = held.tries.cut(len(self.tokens[index])), self.tokens[index]
            outs.append(layer.try_tokens(x, held.tails_STC, held.states_SHDV, self.tried, left))
        return outs

    def settle(self, kept: list[int], num_slots: int) -> None:
        """By so many tokens of each slot."""
        one = self.layers[0]
        known = torch.zeros(num_slots, dtype=torch.int32, device=one.device)
        for (slot, length, _), count in zip(self.slots, kept, strict=True):
            if 0 <= slot < num_slots:
                known[slot] = length + count
        self.states.settle(self.tried, known)

    def of_slot(self, layer: int, row: int) -> Tensor:
        """Its tokens that are tried."""
        first, count = row * self.each, self.slots[row][2]
        return self.tokens[layer][first : first + count]


def plain_steps(
    layer: DeltaLayer | MambaLayer, x: Tensor, tails: Tensor, states: Tensor, slot: int, length: int
) -> Tensor:  # fmt: skip
    """Tokens of one slot, each in a step of its own."""
    outs = [layer.run(x[at : at + 1], tails, states, [(slot, length + at)], [])[0] for at in range(len(x))]
    return torch.stack(outs) if outs else x.new_empty(0, layer.H, layer.V)
