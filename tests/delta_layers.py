"""Gated delta layers with random weights, and what they make of a sequence token by token, in float64."""

import torch
from torch import Tensor

from tercet.model.states import LayerTries
from tercet.triton_kernels.delta_decode import delta_decode
from tercet.triton_kernels.delta_prefill import delta_prefill
from tercet.triton_kernels.delta_prologue import delta_prologue
from tercet.triton_kernels.delta_tried import delta_tried
from tercet.triton_kernels.delta_tried_prologue import delta_tried_prologue
from tercet.triton_kernels.tried_tokens import TriedTokens


class DeltaLayer:
    def __init__(
        self, K: int, H: int, D: int, V: int, W: int = 4, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        self.K, self.H, self.D, self.V, self.W = K, H, D, V, W
        self.dtype, self.device = dtype, device
        self.rates_apart = False
        """The first product has them at the end of its rows, or another one makes them."""
        self.channels = 2 * K * D + H * V
        self.columns = self.channels + H * V + 2 * H
        self.conv = self.random(self.channels, W) * 0.5
        self.a_log = torch.rand(H, device=device) * 3 - 1
        self.dt_bias = torch.randn(H, device=device) * 2 - 2

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def tokens(self, count: int) -> Tensor:
        """Keys of which some are alike, as in text."""
        x = self.random(count, self.columns)
        if count:
            first = self.K * self.D
            again = torch.rand(count, device=self.device) < 0.3
            x[again, first : 2 * first] += 4 * x[0, first : 2 * first]
        return x

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
        rates = x[:, -2 * self.H :].contiguous() if self.rates_apart else None
        qkv, gates = delta_prologue(
            x if rates is None else x[:, : -2 * self.H].contiguous(), tails, self.conv, self.a_log, self.dt_bias, slots,
            lengths, *of_chunks, num_key_heads=self.K, key_dim=self.D, rows=self.ints(B + begins[-1]), rates_TR=rates,
        )  # fmt: skip
        out = torch.full((len(x), self.H, self.V), float("nan"), dtype=self.dtype, device=self.device)
        delta_decode(qkv[:B], gates[:B], states, slots, lengths, num_key_heads=self.K, out_BHV=out[:B])
        delta_prefill(qkv[B:], gates[B:], states, *of_chunks, num_key_heads=self.K, out_THV=out[B:])
        return out

    def try_tokens(self, x: Tensor, tails: Tensor, states: Tensor, tried: TriedTokens, left: LayerTries) -> Tensor:
        """Answers to tokens, or NaN, of a step that tries some; `left` gets what is left of them."""
        rates = x[:, -2 * self.H :].contiguous() if self.rates_apart else None
        delta_tried_prologue(
            x if rates is None else x[:, : -2 * self.H].contiguous(), tails, self.conv, self.a_log, self.dt_bias, tried,
            num_key_heads=self.K, key_dim=self.D, rates_TR=rates,
            inputs_TC=left.inputs_TC, qkv_TC=left.qkv_TC, gates_T2H=left.gates_T2H,
        )  # fmt: skip
        out = torch.full((len(x), self.H, self.V), float("nan"), dtype=self.dtype, device=self.device)
        delta_tried(left.qkv_TC, left.gates_T2H, states, tried, num_key_heads=self.K, out_THV=out)
        return out

    def exact(self, x: Tensor, tails: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Of tokens behind each other: answers, tails and state. None before: they are a sequence's first."""
        K, H, D, V, W = self.K, self.H, self.D, self.V, self.W
        x = x.double()
        before = x.new_zeros(W - 1, self.channels) if tails is None else tails.double()
        state = x.new_zeros(H, D, V) if state is None else state.double()
        inputs, conv = torch.cat((before, x[:, : self.channels])), self.conv.double().T
        out = x.new_empty(len(x), H, V)
        for token, row in enumerate(x):
            summed = (inputs[token : token + W] * conv).sum(0)
            q, k, v = (summed * summed.sigmoid()).split((K * D, K * D, H * V))
            q, k = (heads.view(K, D) for heads in (q, k))
            q = q / (q.square().sum(1, keepdim=True) + 1e-6).sqrt() * D**-0.5
            k = k / (k.square().sum(1, keepdim=True) + 1e-6).sqrt()
            q, k = (heads.repeat_interleave(H // K, 0) for heads in (q, k))
            b, a = row[self.channels + H * V :].chunk(2)
            rate = self.a_log.double().exp() * torch.nn.functional.softplus(a + self.dt_bias.double())
            state = state * (-rate).exp()[:, None, None]
            missing = (v.view(H, V) - torch.einsum("hdv,hd->hv", state, k)) * b.sigmoid()[:, None]
            state = state + k[:, :, None] * missing[:, None]
            out[token] = torch.einsum("hdv,hd->hv", state, q)
        return out, inputs[len(x) :], state
