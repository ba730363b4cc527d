"""How large a step is, padding included: exact on a CPU, in a few fixed sizes on a GPU, where graphs need them.

Launched kernel by kernel, a step of 8,192 tokens of a small model takes the host longer than the GPU: every shape that
a plain step can have is a graph.

Knows sizes only; `graphs.py` captures them and `runner.py` pads to them.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

_FEWEST_TOKENS = 64
"""With fewer prefill tokens attention takes smaller tiles, which do not give the same bits."""
_FEW_TOKENS = 1024
"""Up to here padding is felt: steps have graphs for several numbers of decodes. In longer ones kernels leave out what
is padding, and the rows that only sample are little beside them."""
_TOKENS_MULTIPLE = 128
_CHUNKS = (8, 64)
"""More are padded to the most there can be."""
_ADJUSTED_DECODES = (1, 8, 32, 128)
"""Fewer graphs than of plain steps: those that adjust logits are rarer, and start-up has to be short."""


class StepShape(NamedTuple):
    """Sizes of a step's parts."""

    num_decodes: int
    num_chunks: int
    num_prefill_tokens: int
    whole_logits: bool = False
    """Whether logits are in memory, of all ranks, which some rows need; else the product that makes them draws."""
    adjusted: bool = False
    """Whether some row's logits are changed before sampling."""
    logged: bool = False
    """Whether somebody wants log-probabilities. With prefill, such steps and adjusted ones have no graph."""


class Shapes:
    """The sizes that steps are padded to."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._decodes = _decode_sizes(max_num_seqs)
        self._adjusted_decodes = [*(size for size in _ADJUSTED_DECODES if size < max_num_seqs), max_num_seqs]
        # Beside chunks a multiple of 4, so that what is said about chunks stays aligned.
        self._most_decodes = _round_up(max_num_seqs, 4)
        self._decodes_beside_few = [0, *(size for size in (8, 64) if size < self._most_decodes), self._most_decodes]
        self._tokens = _token_sizes(max_num_batched_tokens)
        self._chunks = [*(size for size in _CHUNKS if size < max_num_seqs), max_num_seqs]
        self.max_rows = self._most_decodes + max_num_seqs
        self.max_tokens = self._most_decodes + self._tokens[-1]

    def for_graphs(self) -> list[StepShape]:
        """Every shape worth a graph, the largest first: their memory is shared, and the first takes the most."""
        # Steps of both kinds are common, and a row's bits may depend on the size: both have all sizes.
        shapes = [StepShape(size, 0, 0, whole_logits) for size in self._decodes for whole_logits in (False, True)]
        shapes += [
            StepShape(size, 0, 0, True, True, logged) for size in self._adjusted_decodes for logged in (False, True)
        ]
        shapes += [
            self._with_chunks(num_decodes, chunks, tokens)
            for chunks in self._chunks
            for tokens in self._tokens_of(chunks)
            for num_decodes in self._decodes_beside(chunks, tokens)
        ]

        def order(shape: StepShape) -> tuple[int, bool, int]:
            return -shape.num_decodes - shape.num_prefill_tokens, not shape.adjusted, shape.num_chunks

        return sorted(shapes, key=order)

    def for_warm_up(self) -> list[StepShape]:
        """What steps with prefill use beyond the kernels of graphs: to adjust logits, to tell log-probabilities."""
        largest = self._with_chunks(self._most_decodes, self._chunks[-1], self._tokens[-1])
        return [largest._replace(adjusted=True, logged=True)]

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
            return StepShape(_smallest(self._adjusted_decodes, num_decodes), 0, 0, True, True, logged)
        if not num_chunks:
            return StepShape(_smallest(self._decodes, num_decodes), 0, 0, whole_logits)
        chunks = _smallest(self._chunks, num_chunks)
        tokens = _smallest(self._tokens_of(chunks), num_tokens)
        padded = _smallest(self._decodes_beside(chunks, tokens), num_decodes)
        return self._with_chunks(padded, chunks, tokens)._replace(adjusted=adjusted, logged=logged)

    def _tokens_of(self, chunks: int) -> list[int]:
        """Prefill tokens of the shapes of so many chunks: few tokens come in few chunks."""
        if chunks == self._chunks[0]:
            return self._tokens
        return [size for size in self._tokens if size >= min(_FEW_TOKENS, self._tokens[-1])]

    def _decodes_beside(self, chunks: int, tokens: int) -> list[int]:
        """Decode rows of the shapes of so many chunks and prefill tokens."""
        if chunks > self._chunks[0]:
            return [self._most_decodes]
        return self._decodes_beside_few if tokens <= _FEW_TOKENS else [0, self._most_decodes]

    def _with_chunks(self, num_decodes: int, num_chunks: int, num_tokens: int) -> StepShape:
        """Steps with prefill have whole logits in any case: beside it that is little, and it halves graphs."""
        return StepShape(num_decodes, num_chunks, num_tokens, whole_logits=True)


def _decode_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, 16, then steps of 16 to 64, of 32 to 256 and of 64 beyond: rows that pad cost next to nothing."""
    sizes = [1, 2, 4, 8, 16]
    while sizes[-1] < max_num_seqs:
        sizes.append(sizes[-1] + (16 if sizes[-1] < 64 else 32 if sizes[-1] < 256 else 64))
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def _token_sizes(max_num_batched_tokens: int) -> list[int]:
    """Powers of 2, and at last what the longest step takes."""
    most = _round_up(max(max_num_batched_tokens, _FEWEST_TOKENS), _TOKENS_MULTIPLE)
    sizes = [_FEWEST_TOKENS]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return [*sizes, most]


def _smallest(sizes: Sequence[int], at_least: int) -> int:
    return sizes[bisect_left(sizes, at_least)]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
