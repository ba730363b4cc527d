"""Layers that carry states, with random weights: what all kinds share, and what a step of theirs is held to."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tercet.model.states import LayerTries
from tercet.triton_kernels.delta_decode import delta_decode
from tercet.triton_kernels.delta_tried import delta_tried
from tercet.triton_kernels.tried_tokens import TriedTokens

NAN = float("nan")

Near = Callable[[Tensor, Tensor], Any]
"""Told what came and what was wanted, the latter in float64."""


class CarriedLayer(ABC):
    skip: Tensor | None = None

    def __init__(self, K: int, H: int, D: int, V: int, W: int, dtype: torch.dtype, device: str, rates: int) -> None:
        """`rates`: numbers of a head at the end of a token's row, of which gates are made."""
        self.K, self.H, self.D, self.V, self.W = K, H, D, V, W
        self.dtype, self.device = dtype, device
        self.channels = 2 * K * D + H * V
        self.columns = self.channels + H * V + rates * H
        self.conv = self.random(self.channels, W) * 0.5
        self.a_log = torch.rand(H, device=device) * 3 - 1
        self.dt_bias = torch.randn(H, device=device) * 2 - 2

    @abstractmethod
    def tokens(self, count: int) -> Tensor: ...

    @abstractmethod
    def prologue(
        self, x: Tensor, tails: Tensor, slots: Tensor, lengths: Tensor, of_chunks: tuple[Tensor, ...], rows: Tensor
    ) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def prefill(
        self, qkv: Tensor, gates: Tensor, states: Tensor, of_chunks: tuple[Tensor, ...], out: Tensor
    ) -> None: ...

    @abstractmethod
    def tried_prologue(self, x: Tensor, tails: Tensor, tried: TriedTokens, left: LayerTries) -> None: ...

    @abstractmethod
    def exact(self, x: Tensor, tails: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Of tokens behind each other: answers, tails and state. None before: they are a sequence's first."""

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def pools(self, num_slots: int, kept_in: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Tails and states that somebody may have left."""
        states = torch.randn(num_slots, self.H, self.D, self.V, device=self.device)
        return self.random(num_slots, self.W - 1, self.channels), states.to(kept_in)

    def ints(self, *numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def run(
        self, x: Tensor, tails: Tensor, states: Tensor, rows: list[tuple[int, int]], chunks: list[tuple[int, int, int]]
    ) -> Tensor:
        """A step: rows' slots and lengths, chunks' slots, starts and counts. Answers to tokens, or NaN."""
        begins = [0]
        for _, _, count in chunks:
            begins.append(begins[-1] + count)
        B = len(rows)
        slots, lengths = (self.ints(*(row[part] for row in rows)) for part in range(2))
        of_chunks = *(self.ints(*(chunk[part] for chunk in chunks)) for part in range(2)), self.ints(*begins)
        qkv, gates = self.prologue(x, tails, slots, lengths, of_chunks, self.ints(B + begins[-1]))
        out, how = self._nothing(x), {"num_key_heads": self.K, "skip_H": self.skip}
        delta_decode(qkv[:B], gates[:B], states, slots, lengths, out_BHV=out[:B], **how)
        self.prefill(qkv[B:], gates[B:], states, of_chunks, out[B:])
        return out

    def try_tokens(self, x: Tensor, tails: Tensor, states: Tensor, tried: TriedTokens, left: LayerTries) -> Tensor:
        """Answers to tokens, or NaN, of a step that tries some; `left` gets what is left of them."""
        self.tried_prologue(x, tails, tried, left)
        out, how = self._nothing(x), {"num_key_heads": self.K, "skip_H": self.skip}
        delta_tried(left.qkv_TC, left.gates_T2H, states, tried, out_THV=out, **how)
        return out

    def _nothing(self, x: Tensor) -> Tensor:
        return torch.full((len(x), self.H, self.V), NAN, dtype=self.dtype, device=self.device)


def check_step(
    layer: CarriedLayer,
    num_slots: int,
    rows: list[tuple[int, int]],
    chunks: list[tuple[int, int, int]],
    padding: int,
    near_out: Near,
    near_state: Near,
) -> None:
    """A step's answers, states and tails, over NaN where nothing is; what nobody has tokens of stays."""
    tails, states = layer.pools(num_slots)
    firsts = [slot for slot, length in rows if length == 1]
    firsts += [slot for slot, start, _ in chunks if start == 0 and 0 <= slot < num_slots]
    for pool in (tails, states):
        pool[firsts] = NAN
    old_tails, old_states = tails.clone(), states.clone()
    num_real = len(rows) + sum(chunk[2] for chunk in chunks)
    x = layer.tokens(num_real + padding)
    x[num_real:] = NAN
    out = layer.run(x, tails, states, rows, chunks)
    sequences = [(slot, length - 1, min(length, 1)) for slot, length in rows] + chunks
    token, untouched = 0, set(range(num_slots))
    for at, (slot, before, count) in enumerate(sequences):
        own = slice(token, token + count)
        if 0 <= slot < num_slots and count:
            untouched.remove(slot)
            pair = (old_tails[slot], old_states[slot]) if before > 0 else (None, None)
            wanted, wanted_tails, wanted_state = layer.exact(x[own], *pair)
            near_out(out[own], wanted)
            near_state(states[slot], wanted_state)
            assert torch.equal(tails[slot].double(), wanted_tails)
        elif at < len(rows):
            assert not out[at].count_nonzero()
        token += max(count, at < len(rows))
    for slot in untouched:
        assert torch.equal(states[slot].nan_to_num(7), old_states[slot].nan_to_num(7))
        assert torch.equal(tails[slot].nan_to_num(7), old_tails[slot].nan_to_num(7))


def check_bits_however_cut(layer: CarriedLayer, cases: list[tuple[list[int], bool]], ahead: int) -> None:
    """Of a prompt alone in one chunk, and in several beside others, one of `ahead` tokens before them; then of a token
    that is decoded, alone and among others."""
    total = sum(cases[0][0])
    x, answers = layer.tokens(total + 1), []
    for cuts, beside in cases:
        tails, states = layer.pools(4)
        tails[1] = states[1] = NAN
        outs, start = [], 0
        for count in cuts:
            rows, chunks = [(0, 9)] * beside, [(2, 64, ahead)] * beside + [(1, start, count)] + [(3, 0, 65)] * beside
            own, first = x[start : start + count], ahead + 1 if beside else 0
            tokens = torch.cat((layer.tokens(first), own, layer.tokens(65))) if beside else own
            outs.append(layer.run(tokens, tails, states, rows, chunks)[first : first + count])
            start += count
        rows = [(0, 7), (2, 3), (1, total + 1), (3, 1)] if beside else [(1, total + 1)]
        tokens = torch.cat((layer.tokens(2), x[total:], layer.tokens(1))) if beside else x[total:]
        outs.append(layer.run(tokens, tails, states, rows, [])[2 if beside else 0][None])
        answers.append((torch.cat(outs), states[1], tails[1]))
    for answer in answers[1:]:
        assert all(map(torch.equal, answer, answers[0]))
