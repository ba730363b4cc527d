"""The stream of a layer whose first product reads more than it: what was joined to the stream, normed, once.

Behind that product it is a stream as any other. Knows nothing of what was joined.

Shape suffixes: T tokens of the step, D hidden size, E = 2 D, N an inner size of this rank.
"""

from collections.abc import Iterator

from torch import Tensor

from tercet.model.linear import Matrix, linear
from tercet.model.parallel import Group
from tercet.model.residual import Normed, Residual


class JoinedResidual(Residual):
    """As `Residual`, but for what is read first."""

    def __init__(
        self,
        stream_TD: Tensor,
        joined_TE: Tensor,
        group: Group,
        eps: float,
        *,
        deterministic: bool,
        rows: Tensor | None,
    ) -> None:
        super().__init__(stream_TD, group, eps, deterministic=deterministic, rows=rows)
        self._joined_TE: Tensor | None = joined_TE

    def norm_linear(self, norm_D: Tensor, weight_ND: Matrix, bias_N: Tensor | None) -> Tensor:
        if (joined_TE := self._joined_TE) is None:
            return super().norm_linear(norm_D, weight_ND, bias_N)
        self._joined_TE = None
        return linear(joined_TE, weight_ND, bias_N, deterministic=self._deterministic, rows=self._rows)

    def normed(self, norm_D: Tensor) -> Iterator[Normed]:
        if (joined_TE := self._joined_TE) is None:
            yield from super().normed(norm_D)
            return
        self._joined_TE = None
        yield Normed(slice(0, len(joined_TE)), joined_TE, self._rows)
