"""Gated delta layers with random weights, and what they make of a sequence token by token, in float64."""

from typing import Any

import torch
from torch import Tensor

from carried_layers import CarriedLayer
from tercet.model.states import LayerTries
from tercet.triton_kernels.delta_prefill import delta_prefill
from tercet.triton_kernels.delta_prologue import delta_prologue
from tercet.triton_kernels.delta_tried_prologue import delta_tried_prologue
from tercet.triton_kernels.tried_tokens import TriedTokens


class DeltaLayer(CarriedLayer):
    def __init__(
        self, K: int, H: int, D: int, V: int, W: int = 4, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        super().__init__(K, H, D, V, W, dtype, device, 2)
        self.rates_apart = False
        """The first product has them at the end of its rows, or another one makes them."""

    def tokens(self, count: int) -> Tensor:
        """Keys of which some are alike, as in text."""
        x = self.random(count, self.columns)
        if count:
            first = self.K * self.D
            again = torch.rand(count, device=self.device) < 0.3
            x[again, first : 2 * first] += 4 * x[0, first : 2 * first]
        return x

    def prologue(
        self, x: Tensor, tails: Tensor, slots: Tensor, lengths: Tensor, of_chunks: tuple[Tensor, ...], rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        x, how = self._with_rates(x)
        return delta_prologue(
            x, tails, self.conv, self.a_log, self.dt_bias, slots, lengths, *of_chunks, rows=rows, **how
        )  # fmt: skip

    def prefill(self, qkv: Tensor, gates: Tensor, states: Tensor, of_chunks: tuple[Tensor, ...], out: Tensor) -> None:
        delta_prefill(qkv, gates, states, *of_chunks, num_key_heads=self.K, out_THV=out)

    def tried_prologue(self, x: Tensor, tails: Tensor, tried: TriedTokens, left: LayerTries) -> None:
        x, how = self._with_rates(x)
        delta_tried_prologue(
            x, tails, self.conv, self.a_log, self.dt_bias, tried,
            inputs_TC=left.inputs_TC, qkv_TC=left.qkv_TC, gates_T2H=left.gates_T2H, **how,
        )  # fmt: skip

    def _with_rates(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Rows as a prologue takes them, and what it is told of heads and rates."""
        how: dict[str, Any] = {"num_key_heads": self.K, "key_dim": self.D}
        if not self.rates_apart:
            return x, how
        return x[:, : -2 * self.H].contiguous(), how | {"rates_TR": x[:, -2 * self.H :].contiguous()}

    def exact(self, x: Tensor, tails: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
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
