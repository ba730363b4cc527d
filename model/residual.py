"""The stream of hidden states that runs through a step, to which every block adds.

It knows how what blocks add becomes part of the stream: in a block's last product where there is one rank; with several
that product is a part of an update, which the next norm sums over ranks and adds first; so it does with the parts of a
product whose K is divided, and with what has a norm of its own. Knows no attention, no layer.

Shape suffixes: T tokens of the step, D hidden size, N a block's inner size of this rank, F intermediate size of it,
S parts of an update, R some of the tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from tercet.model.linear import (
    Matrix,
    linear,
    linear_add,
    linear_gate,
    linear_parts,
    rms_norm_linear,
    rms_norm_linear_gate,
)
from tercet.model.parallel import Group
from tercet.triton_kernels.add_normed import add_normed, add_normed_rms_norm
from tercet.triton_kernels.add_rms_norm import add_rms_norm, rms_norm
from tercet.triton_kernels.all_reduce import all_reduce_add_rms_norm, all_reduce_parts
from tercet.triton_kernels.embedding import embedding
from tercet.triton_kernels.residual_add import residual_add


@dataclass(frozen=True)
class Normed:
    """Tokens of the stream, normed as a block wants it: all of them, or some that follow each other."""

    rows: slice
    x_TD: Tensor
    count_1: Tensor | None
    """How many tokens there are in truth, from the first of these on: those behind the last of these count too."""


class Residual:
    """The stream of one step on one rank."""

    def __init__(
        self, stream_TD: Tensor, group: Group, eps: float, *, deterministic: bool, rows: Tensor | None
    ) -> None:
        """Takes `stream_TD` over and adds to it in place. `eps`: of the norms. `rows`: see `linear.py`."""
        self._stream_TD = stream_TD
        self._update_TD: Tensor | None = None  # or its parts: [S, T, D]
        self._update_norm_D: Tensor | None = None
        self._scale_1: Tensor | None = None
        self._group = group
        self._eps = eps
        self._deterministic = deterministic
        self._rows = rows

    @property
    def ahead_of_layer(self) -> Tensor:
        """The stream as a layer has found it, [T, D], once that has read it and until it adds to it."""
        assert self._update_TD is None
        return self._stream_TD

    def norm_linear(self, norm_D: Tensor, weight_ND: Matrix, bias_N: Tensor | None) -> Tensor:
        """Norm and project the stream: [T, N]."""
        if self._update_TD is None:
            return rms_norm_linear(
                self._stream_TD, norm_D, self._eps, weight_ND, bias_N, deterministic=self._deterministic,
                rows=self._rows,
            )  # fmt: skip
        return linear(self._normed(norm_D), weight_ND, bias_N, deterministic=self._deterministic, rows=self._rows)

    def read(self, norm_D: Tensor | None, weight_ND: Matrix, bias_N: Tensor | None) -> Tensor:
        """Project the stream, normed if there is a norm: [T, N]."""
        return self.linear(weight_ND, bias_N) if norm_D is None else self.norm_linear(norm_D, weight_ND, bias_N)

    def linear(self, weight_ND: Matrix, bias_N: Tensor | None) -> Tensor:
        """Project the stream as it is: [T, N]."""
        return linear(self.whole(), weight_ND, bias_N, deterministic=self._deterministic, rows=self._rows)

    def normed(self, norm_D: Tensor) -> Iterator[Normed]:
        """Norm the stream, part by part: to be used before the next one is asked for."""
        if self._update_TD is None:
            x_TD = rms_norm(self._stream_TD, norm_D, self._eps, self._rows, deterministic=self._deterministic)
        else:
            x_TD = self._normed(norm_D)
        yield Normed(slice(0, len(x_TD)), x_TD, self._rows)

    def as_it_is(self) -> Iterator[Normed]:
        """The stream for what reads it so, as `normed` gives it."""
        stream_TD = self.whole()
        yield Normed(slice(0, len(stream_TD)), stream_TD, self._rows)

    def norm_gate(self, norm_D: Tensor, weight_2FD: Matrix) -> Tensor:
        """Norm and project the stream, gate and up rows in turns, and gate it: [T, F]."""
        if self._update_TD is None:
            return rms_norm_linear_gate(
                self._stream_TD, norm_D, self._eps, weight_2FD, deterministic=self._deterministic, rows=self._rows
            )
        return linear_gate(self._normed(norm_D), weight_2FD, deterministic=self._deterministic, rows=self._rows)

    def gate(self, weight_2FD: Matrix) -> Tensor:
        """Project the stream as it is, gate and up rows in turns, and gate it: [T, F]."""
        return linear_gate(self.whole(), weight_2FD, deterministic=self._deterministic, rows=self._rows)

    def add(self, x_TN: Tensor, weight_DN: Matrix, bias_D: Tensor | None) -> None:
        """Add a block's projection, a part on each rank."""
        if bias_D is None:
            self._update_TD = self._parts(x_TN, weight_DN)
            if self._update_TD is not None:
                return
            if self._group.size == 1:
                linear_add(x_TN, weight_DN, self._stream_TD, deterministic=self._deterministic, rows=self._rows)
                return
        # A bias counts once, not once a rank.
        bias_D = bias_D if self._group.rank == 0 else None
        self._update_TD = linear(x_TN, weight_DN, bias_D, deterministic=self._deterministic, rows=self._rows)

    def add_normed(
        self, x_TN: Tensor, weight_DN: Matrix, bias_D: Tensor | None, norm_D: Tensor, scale_1: Tensor | None = None
    ) -> None:
        """Add a block's projection, a part on each rank, normed: that takes the sum over ranks at once. `scale_1`: what
        the stream is multiplied by then."""
        bias_D = bias_D if self._group.rank == 0 else None
        update_TD = linear(x_TN, weight_DN, bias_D, deterministic=self._deterministic, rows=self._rows)
        self.add_whole(self._group.all_reduce(update_TD, deterministic=self._deterministic), norm_D, scale_1)

    def add_whole(self, update_TD: Tensor, norm_D: Tensor, scale_1: Tensor | None) -> None:
        """The same of an update that is the sum over ranks."""
        self._update_TD, self._update_norm_D, self._scale_1 = update_TD, norm_D, scale_1

    def add_block(self, norm_D: Tensor, block: Callable[[Tensor, Tensor | None], Tensor]) -> None:
        """Add what `block` makes of the normed stream, a part on each rank. It is told how many rows there are."""
        for part in self.normed(norm_D):
            self._update_TD = block(part.x_TD, part.count_1)

    def of_rows(self, rows_R: Tensor) -> "Residual":
        """The stream of some tokens, with what is still to be added; this one knows nothing of what is added to it."""
        stream_RD = embedding(rows_R, self._stream_TD)
        rows = Residual(stream_RD, self._group, self._eps, deterministic=self._deterministic, rows=None)
        if self._update_TD is not None:
            rows._update_TD = embedding(rows_R, self._update_TD)
            rows._update_norm_D, rows._scale_1 = self._update_norm_D, self._scale_1
        return rows

    def whole(self) -> Tensor:
        """The stream with all that was added so far, which may be added to."""
        stream_TD, self._update_TD = self.end(), None
        return stream_TD

    def end(self) -> Tensor:
        """The stream with all that was added, before the final norm."""
        if self._update_TD is None:
            return self._stream_TD
        update_TD = self._update_TD
        if self._update_norm_D is not None:
            return add_normed(
                update_TD, self._stream_TD, self._update_norm_D, self._eps, self._rows, scale=self._scale_1,
                deterministic=self._deterministic,
            )  # fmt: skip
        if self._group.size == 1:
            return residual_add(update_TD, self._stream_TD)
        if update_TD.ndim == self._stream_TD.ndim:
            self._group.all_reduce(update_TD, deterministic=self._deterministic)
        else:
            inboxes = self._group.inboxes_for(self._stream_TD)
            assert inboxes is not None  # or there were no parts
            update_TD = all_reduce_parts(update_TD, self._stream_TD.dtype, inboxes)
        return residual_add(update_TD, self._stream_TD)

    def _parts(self, x_TN: Tensor, weight_DN: Matrix) -> Tensor | None:
        """The parts of a projection, if it is better done so and what comes next can add them."""
        one_rank = self._group.size == 1
        if self._deterministic:
            return None
        if not (one_rank or self._group.inboxes_for(self._stream_TD)):
            return None
        return linear_parts(x_TN, weight_DN, whole="matmul_add" if one_rank else "matmul", rows=self._rows)

    def _normed(self, norm_D: Tensor) -> Tensor:
        """Add the update's sum over ranks into the stream; the total, normed: in one kernel where ranks are peers.

        That kernel's norm sums in another order, and which rows it serves depends on the batch: not deterministic.
        """
        update_TD, self._update_TD = self._update_TD, None
        assert update_TD is not None
        if self._update_norm_D is not None:
            return add_normed_rms_norm(
                update_TD, self._stream_TD, self._update_norm_D, norm_D, self._eps, self._rows, scale=self._scale_1,
                deterministic=self._deterministic,
            )  # fmt: skip
        if not self._deterministic and (inboxes := self._group.inboxes_for(self._stream_TD)):
            return all_reduce_add_rms_norm(update_TD, self._stream_TD, norm_D, self._eps, inboxes)
        self._group.all_reduce(update_TD, deterministic=self._deterministic)
        return add_rms_norm(
            update_TD, self._stream_TD, norm_D, self._eps, self._rows, deterministic=self._deterministic
        )
