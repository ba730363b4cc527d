"""The stream of hidden states of a long step on several ranks: sums of one half travel while the other is computed.

Knows the order of products and messages; `exchange.py` knows how messages travel.

Shape suffixes as in `residual.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from tercet.model.exchange import Exchange, Message, half_of
from tercet.model.linear import Matrix, linear, linear_gate
from tercet.model.parallel import Group
from tercet.model.residual import Normed, Residual
from tercet.triton_kernels.add_rms_norm import rms_norm


@dataclass
class _Half:
    rows: slice
    count_1: Tensor
    """How many tokens there are from its first on: those behind its end count too."""
    update: Message | None = None


class ExchangedResidual(Residual):
    """As `Residual`, with the same numbers."""

    def __init__(
        self, stream_TD: Tensor, group: Group, eps: float, exchange: Exchange, *, deterministic: bool, rows: Tensor
    ) -> None:
        super().__init__(stream_TD, group, eps, deterministic=deterministic, rows=rows)
        self._exchange = exchange
        first = half_of(len(stream_TD))
        self._halves = (
            _Half(slice(0, first), rows),
            _Half(slice(first, len(stream_TD)), exchange.begin(rows, first)),
        )

    def norm_linear(self, norm_D: Tensor, weight_ND: Matrix, bias_N: Tensor | None) -> Tensor:
        y_TN = self._stream_TD.new_empty(len(self._stream_TD), len(weight_ND))
        for part in self.normed(norm_D):
            linear(part.x_TD, weight_ND, bias_N, y_TN[part.rows], deterministic=self._deterministic, rows=part.count_1)
        return y_TN

    def normed(self, norm_D: Tensor) -> Iterator[Normed]:
        for half in self._halves:
            yield Normed(half.rows, self._normed_half(half, norm_D), half.count_1)

    def norm_gate(self, norm_D: Tensor, weight_2FD: Matrix) -> Tensor:
        y_TF = self._stream_TD.new_empty(len(self._stream_TD), len(weight_2FD) // 2)
        for part in self.normed(norm_D):
            linear_gate(part.x_TD, weight_2FD, y_TF[part.rows], deterministic=self._deterministic, rows=part.count_1)
        return y_TF

    def add(self, x_TN: Tensor, weight_DN: Matrix, bias_D: Tensor | None) -> None:
        bias_D = bias_D if self._group.rank == 0 else None
        for half in self._halves:
            update_TD = linear(x_TN[half.rows], weight_DN, bias_D, deterministic=self._deterministic, rows=half.count_1)
            half.update = self._exchange.send(update_TD)

    def add_block(self, norm_D: Tensor, block: Callable[[Tensor, Tensor | None], Tensor]) -> None:
        for half in self._halves:
            half.update = self._exchange.send(block(self._normed_half(half, norm_D), half.count_1))

    def of_rows(self, rows_R: Tensor) -> Residual:
        """Right behind a norm. Also ends the step's messages: few rows are summed as those of any short step."""
        self._exchange.end([])
        return super().of_rows(rows_R)

    def end(self) -> Tensor:
        self._exchange.end(
            [(half.update, self._stream_TD[half.rows]) for half in self._halves if half.update is not None]
        )
        return self._stream_TD

    def _normed_half(self, half: _Half, norm_D: Tensor) -> Tensor:
        stream_TD = self._stream_TD[half.rows]
        if half.update is None:
            return rms_norm(stream_TD, norm_D, self._eps, half.count_1, deterministic=self._deterministic)
        return self._exchange.add(half.update, stream_TD, norm_D, self._eps, half.count_1)
