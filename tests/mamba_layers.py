"""Mamba-2 layers with random weights, and what they make of a sequence token by token, in float64."""

import torch
from torch import Tensor

from carried_layers import CarriedLayer
from tercet.model.states import LayerTries
from tercet.triton_kernels.mamba_prefill import mamba_prefill
from tercet.triton_kernels.mamba_prologue import mamba_prologue
from tercet.triton_kernels.mamba_tried_prologue import mamba_tried_prologue
from tercet.triton_kernels.tried_tokens import TriedTokens


class MambaLayer(CarriedLayer):
    skip: Tensor

    def __init__(
        self, K: int, H: int, D: int, V: int, W: int = 4, dtype: torch.dtype = torch.float32, device: str = "cpu",
        time_steps: tuple[float, float] = (0.0, float("inf")),
    ) -> None:  # fmt: skip
        super().__init__(K, H, D, V, W, dtype, device, 1)
        self.time_steps = time_steps
        self.bias = self.random(self.channels) * 0.5
        self.skip = torch.randn(H, device=device)

    def tokens(self, count: int) -> Tensor:
        """Queries and keys of length one or so."""
        x = self.random(count, self.columns)
        x[:, : 2 * self.K * self.D] *= 2 * self.D**-0.25
        return x

    def prologue(
        self, x: Tensor, tails: Tensor, slots: Tensor, lengths: Tensor, of_chunks: tuple[Tensor, ...], rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        weights = self.conv, self.bias, self.a_log, self.dt_bias
        return mamba_prologue(x, tails, *weights, slots, lengths, *of_chunks, time_steps=self.time_steps, rows=rows)

    def prefill(self, qkv: Tensor, gates: Tensor, states: Tensor, of_chunks: tuple[Tensor, ...], out: Tensor) -> None:
        mamba_prefill(qkv, gates, self.skip, states, *of_chunks, num_key_heads=self.K, out_THV=out)

    def tried_prologue(self, x: Tensor, tails: Tensor, tried: TriedTokens, left: LayerTries) -> None:
        mamba_tried_prologue(
            x, tails, self.conv, self.bias, self.a_log, self.dt_bias, tried, time_steps=self.time_steps,
            inputs_TC=left.inputs_TC, qkv_TC=left.qkv_TC, gates_T2H=left.gates_T2H,
        )  # fmt: skip

    def exact(self, x: Tensor, tails: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
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
