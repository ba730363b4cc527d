"""Mamba-2 layers with random weights, and what they make of a sequence token by token, in float64."""

import torch
from torch import Tensor

from tercet.model.states import LayerTries
from tercet.triton_kernels.delta_decode import delta_decode
from tercet.triton_kernels.delta_tried import delta_tried
from tercet.triton_kernels.mamba_prefill import mamba_prefill
from tercet.triton_kernels.mamba_prologue import mamba_prologue
from tercet.triton_kernels.mamba_tried_prologue import mamba_tried_prologue
from tercet.triton_kernels.tried_tokens import TriedTokens


class MambaLayer:
    def __init__(
        self, K: int, H: int, D: int, V: int, W: int = 4, dtype: torch.dtype = torch.float32, device: str = "cpu",
        time_steps: tuple[float, float] = (0.0, float("inf")),
    ) -> None:  # fmt: skip
        self.K, self.H, self.D, self.V, self.W = K, H, D, V, W
        self.dtype, self.device, self.time_steps = dtype, device, time_steps
        self.channels = 2 * K * D + H * V
        self.columns = self.channels + H * V + H
        self.conv, self.bias = self.random(self.channels, W) * 0.5, self.random(self.channels) * 0.5
        self.a_log = torch.rand(H, device=device) * 3 - 1
        self.dt_bias = torch.randn(H, device=device) * 2 - 2
        self.skip = torch.randn(H, device=device)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def tokens(self, count: int) -> Tensor:
        """Queries and keys of length one or so."""
        x = self.random(count, self.columns)
        x[:, : 2 * self.K * self.D] *= 2 * self.D**-0.25
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
        qkv, gates = mamba_prologue(
            x, tails, self.conv, self.bias, self.a_log, self.dt_bias, slots, lengths, *of_chunks,
            time_steps=self.time_steps, rows=self.ints(B + begins[-1]),
        )  # fmt: skip
        out = torch.full((len(x), self.H, self.V), float("nan"), dtype=self.dtype, device=self.device)
        how = {"num_key_heads": self.K}
        delta_decode(qkv[:B], gates[:B], states, slots, lengths, out_BHV=out[:B], skip_H=self.skip, **how)
        mamba_prefill(qkv[B:], gates[B:], self.skip, states, *of_chunks, out_THV=out[B:], **how)
        return out

    def try_tokens(self, x: Tensor, tails: Tensor, states: Tensor, tried: TriedTokens, left: LayerTries) -> Tensor:
        """Answers to tokens, or NaN, of a step that tries some; `left` gets what is left of them."""
        mamba_tried_prologue(
            x, tails, self.conv, self.bias, self.a_log, self.dt_bias, tried, time_steps=self.time_steps,
            inputs_TC=left.inputs_TC, qkv_TC=left.qkv_TC, gates_T2H=left.gates_T2H,
        )  # fmt: skip
        out = torch.full((len(x), self.H, self.V), float("nan"), dtype=self.dtype, device=self.device)
        delta_tried(
            left.qkv_TC, left.gates_T2H, states, tried, num_key_heads=self.K, out_THV=out, skip_H=self.skip
        )  # fmt: skip
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
            summed = (inputs[token : token + W] * conv).sum(0) + self.bias.double()
            q, k, v = (summed * summed.sigmoid()).split((K * D, K * D, H * V))
            q, k = (heads.view(K, D).repeat_interleave(H // K, 0) for heads in (q, k))
            v = v.view(H, V)
            step = torch.nn.functional.softplus(row[-H:] + self.dt_bias.double()).clamp(*self.time_steps)
            state = state * (-self.a_log.double().exp() * step).exp()[:, None, None]
            state = state + k[:, :, None] * (step[:, None] * v)[:, None]
            out[token] = torch.einsum("hdv,hd->hv", state, q) + self.skip.double()[:, None] * v
        return out, inputs[len(x) :], state
