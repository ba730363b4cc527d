"""How large a step is, padding included: exact on a CPU, in a few fixed sizes on a GPU, where graphs need them.

Knows sizes only; `graphs.py` captures them and `runner.py` pads to them.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

_GRAPH_TOKENS = (64, 128, 256, 512, 1024)
"""Prefill tokens of graphs. With fewer than 64, attention takes smaller tiles, which do not give the same bits. Longer
steps take so long that launching them kernel by kernel hides behind the last one, and padding them would cost more."""
_GRAPH_CHUNKS = 8
_EAGER_TOKENS = 128
_ADJUSTED_DECODES = (1, 8, 32, 128)
"""Fewer graphs than of plain steps: those that adjust logits are rarer, and start-up has to be short."""
"""Longer steps are padded to a multiple of this."""


class StepShape(NamedTuple):
    """Sizes of a step's parts."""

    num_decodes: int
    num_chunks: int
    num_prefill_tokens: int
    whole_logits: bool = False
    """Whether ranks gather the logits of all, which some rows need, or each samples from its own and they compare."""
    adjusted: bool = False
    """Whether some row's logits are changed before sampling."""
    logged: bool = False
    """Whether somebody wants log-probabilities. With prefill such steps have no graph."""


class Shapes:
    """The sizes that steps are padded to."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, num_ranks: int = 1) -> None:
        self._several_ranks = num_ranks > 1
        self.decodes = _decode_sizes(max_num_seqs)
        self._adjusted_decodes = [*(size for size in _ADJUSTED_DECODES if size < max_num_seqs), max_num_seqs]
        # Beside chunks a multiple of 4, so that what is said about chunks stays aligned.
        largest = _round_up(max_num_seqs, 4)
        self.decodes_beside_prefill = [0, *(size for size in (8, 64) if size < largest), largest]
        self._tokens = [size for size in _GRAPH_TOKENS if size <= max_num_batched_tokens]
        self._chunks = min(_GRAPH_CHUNKS, max_num_seqs)
        self._max_num_seqs = max_num_seqs
        self.max_rows = largest + max_num_seqs
        self.max_tokens = largest + _round_up(max_num_batched_tokens, _EAGER_TOKENS)
        self._max_num_batched_tokens = max_num_batched_tokens

    def for_graphs(self) -> list[StepShape]:
        """Every shape worth a graph, the largest first: their memory is shared, and the first takes the most."""
        shapes = [StepShape(size, 0, 0) for size in self.decodes]
        if self._several_ranks:
            shapes += [StepShape(size, 0, 0, True) for size in self.decodes]
        shapes += [
            StepShape(size, 0, 0, self._several_ranks, True, logged)
            for size in self._adjusted_decodes
            for logged in (False, True)
        ]
        shapes += [
            self._with_chunks(num_decodes, self._chunks, tokens)
            for tokens in self._tokens
            for num_decodes in self.decodes_beside_prefill
        ]

        def order(shape: StepShape) -> tuple[int, bool, int]:
            return -shape.num_decodes - shape.num_prefill_tokens, not shape.adjusted, shape.num_chunks

        return sorted(shapes, key=order)

    def for_warm_up(self) -> list[StepShape]:
        """Steps without a graph that together use every kernel such steps use, the largest among them."""
        largest = _round_up(self._max_num_batched_tokens, _EAGER_TOKENS)
        shapes = [self._with_chunks(self.decodes_beside_prefill[-1], self._max_num_seqs, largest)]
        shapes.append(shapes[0]._replace(adjusted=True, logged=True))
        chunks = self._chunks
        while chunks < self._max_num_seqs:  # kernels are compiled for each number of chunks
            shapes.append(self._with_chunks(0, chunks, largest))
            chunks *= 2
        tokens = 2 * self._tokens[-1] if self._tokens else _EAGER_TOKENS
        while tokens < largest:
            shapes.append(self._with_chunks(0, self._chunks, tokens))
            tokens *= 2
        return shapes

    def fit(
        self,
        num_decodes: int,
        num_chunks: int,
        num_tokens: int,
        whole_logits: bool = False,
        adjusted: bool = False,
        logged: bool = False,
    ) -> StepShape:
        """The shape that a step is padded to. `whole_logits`, `adjusted`, `logged`: some row needs that."""
        if not num_chunks and (adjusted or logged):
            return StepShape(_smallest(self._adjusted_decodes, num_decodes), 0, 0, self._several_ranks, True, logged)
        if not num_chunks:
            return StepShape(_smallest(self.decodes, num_decodes), 0, 0, whole_logits and self._several_ranks)
        if self._tokens and num_chunks <= self._chunks and num_tokens <= self._tokens[-1]:
            padded = _smallest(self.decodes_beside_prefill, num_decodes)
            shape = self._with_chunks(padded, self._chunks, _smallest(self._tokens, num_tokens))
        else:
            padded = _round_up(_smallest([0, *self.decodes], num_decodes), 4)
            shape = self._with_chunks(padded, self._round_chunks(num_chunks), _round_up(num_tokens, _EAGER_TOKENS))
        return shape._replace(adjusted=adjusted, logged=logged)

    def _with_chunks(self, num_decodes: int, num_chunks: int, num_tokens: int) -> StepShape:
        """Ranks gather the logits of steps with prefill in any case: beside it that is little, and it halves graphs."""
        return StepShape(num_decodes, num_chunks, num_tokens, self._several_ranks)

    def _round_chunks(self, num_chunks: int) -> int:
        chunks = self._chunks
        while chunks < num_chunks:
            chunks *= 2
        return min(chunks, self._max_num_seqs)


def _decode_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, 16, then steps of 16 to 64, of 32 to 256 and of 64 beyond: rows that pad cost next to nothing."""
    sizes = [1, 2, 4, 8, 16]
    while sizes[-1] < max_num_seqs:
        sizes.append(sizes[-1] + (16 if sizes[-1] < 64 else 32 if sizes[-1] < 256 else 64))
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def _smallest(sizes: Sequence[int], at_least: int) -> int:
    return sizes[bisect_left(sizes, at_least)]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
