"""The sizes that steps on a GPU are padded to: there is a graph for each, sooner or later.

Launched kernel by kernel, a step of 8,192 tokens of a small model takes the host longer than the GPU: every shape that
a step can have is a graph, but for those that tell of prompts.

Knows sizes only; `graphs.py` captures them and `runner.py` pads to them.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from tercet.model.step_shape import TOKENS_MULTIPLE, Part, StepShape, full_rows, round_up
from tercet.model.trial_shapes import TrialShapes
from tercet.triton_kernels.attention import DEEP
from tercet.triton_kernels.fused_decode import LONG

_FEWEST_TOKENS = 64
"""With fewer prefill tokens attention takes smaller tiles, which do not give the same bits."""
_FEW_TOKENS = 1024
"""Up to here padding is felt. In longer steps kernels leave out what is behind the last token, and the rows that only
sample are little beside them."""
_CHUNKS = (8, 64)
"""More are padded to the most there can be."""
_DECODES_BESIDE_FEW = (0, 8, 64)
_DECODES_BESIDE = (0, 64)
_DECODES_BESIDE_MANY = (64, 256)
"""Decodes beside few tokens, beside more, and beside many chunks: with the first chunks of many requests come few."""
_SHORT = {1: (512, 768, 1024, 2048), 2: (512, 1024, 1536), 4: (512,)}
"""By decode rows with no prompt beside them, tokens of the longest up to which attention is given no more programs than
such rows have tiles: none takes room from the products behind it for nothing."""
SHORT_ROWS = max(_SHORT)
_NEVER_DEEP: Mapping[int, int] = MappingProxyType({})
_BEFORE_LONG = 12_288
"""Of a row alone in a small model: up to here it takes less time to have less to wait for, and then to be made for
bandwidth. In large models, whose products leave attention more room, it never comes to that."""
_TRIALS_OF_SMALL = {1: (768, 1536, 16_384, LONG), 2: (768, 1536, 8_192, LONG), 4: (768, 4_096, LONG), 8: (1536, LONG)}
_TRIALS_OF_LARGE = {1: (768, 1536, 8_192, LONG), 2: (4_096, LONG), 4: (2_048, LONG), 8: (1_024, LONG)}
"""Both together, by slots that try several tokens each, or the next more; of the longest."""
_PLAIN = ((False, False, False), (True, False, False))
"""Of decodes, whether they have whole logits, are adjusted, are logged."""
_EXTRA = ((True, True, False), (True, False, True), (True, True, True))


class Shapes:
    """The sizes that steps are padded to."""

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        short_rows: int = SHORT_ROWS,
        short_trials: int = SHORT_ROWS,
        fewest_rows: int = 2,
        most_deep: Mapping[int, int] = _NEVER_DEEP,
        trials: TrialShapes | None = None,
        adapted: bool = False,
        always_adapted: bool = False,
        sees: bool = False,
    ) -> None:
        """`short_rows`: up to how many rows attention serves in another way while they are short: several in small
        models; `short_trials`: the same, slots that try several tokens each; `fewest_rows`: to which more than one are
        padded; `most_deep`: by tokens before them, up to how many prefill tokens attention serves in another way there;
        `trials`: of steps with guesses, if there are any; `adapted`: there are steps with adapters; `sees`: and with
        images."""
        self._most_deep = most_deep
        self._adapted = adapted
        self._sees = sees
        self.always_adapted = always_adapted
        """Steps run as if some row had an adapter even where none has: so they have the same bits in any company."""
        self._trials = [] if trials is None else trials.for_graphs()
        self._tried_lengths: Mapping[int, tuple[int, ...]] = {}
        if short_trials:
            self._tried_lengths = _TRIALS_OF_SMALL if short_trials > 1 else _TRIALS_OF_LARGE
        self._lengths = {rows: lengths for rows, lengths in _SHORT.items() if rows <= short_rows}
        if short_rows > 1:
            self._lengths[1] += _BEFORE_LONG, LONG
        self._decodes = _decode_sizes(max_num_seqs, fewest_rows)
        most = self.max_decodes = self._decodes[-1]
        # Beside chunks a multiple of 4, so that what is said about chunks stays aligned.
        self._most_decodes = round_up(most, 4)
        self._tokens = _token_sizes(max_num_batched_tokens)
        self._chunks = [*(size for size in _CHUNKS if size < max_num_seqs), max_num_seqs]
        most_tried = 0 if trials is None else trials.max_rows
        self.max_rows = max(self._most_decodes + max_num_seqs, most_tried)
        self.max_tokens = max(self._largest.num_decodes + self._largest.num_prefill_tokens, most_tried)

    def for_graphs(self) -> list[StepShape]:
        """Every shape worth a graph ahead of its first step, the largest first: their memory is shared, and the first
        takes the most."""
        shapes = [*self._decodes_of(*_PLAIN, *_EXTRA), *self._halves()]
        shapes += [
            self._with_chunks(num_decodes, chunks, tokens)
            for chunks in self._chunks
            for tokens in self._tokens_of(chunks)
            for num_decodes in self._decodes_beside(chunks, tokens)
        ]
        shapes += [shape._replace(deep=deep) for shape in shapes for deep in self._depths_of(shape)]
        shapes += [
            shape._replace(longest=longest)
            for shape in self._trials
            for longest in _and_any(self._lengths_of(shape.num_trials))
        ]

        if self._adapted:
            bare = () if self.always_adapted else shapes
            shapes = [*(shape._replace(adapted=shape.part != Part.DRAW) for shape in shapes), *bare]
        if self._sees:
            few = [shape for shape in shapes if shape.num_chunks == self._chunks[0]]
            shapes += [shape._replace(with_images=True) for shape in few]

        def order(shape: StepShape) -> tuple[int, bool, bool, int]:
            num_tokens = shape.num_decodes + shape.num_prefill_tokens
            return -num_tokens, not shape.adapted, not shape.adjusted, -shape.num_chunks

        return sorted(dict.fromkeys(shapes), key=order)  # beside many rows few tokens fill up to the same

    def for_lulls(self) -> list[StepShape]:
        """The same, the smallest first, since traffic is light while there are lulls; last what only grammars need."""
        smallest_first = self.for_graphs()[::-1]
        return sorted(smallest_first, key=lambda shape: shape.part != Part.ALL)

    def plain(self) -> list[StepShape]:
        """Those of `for_graphs` with nothing that only some requests want."""
        shapes = self.for_graphs()
        whole = [shape for shape in shapes if shape.part == Part.ALL]
        return [shape for shape in whole if not (shape.adjusted or shape.logged or shape.with_images)]

    def for_start(self) -> list[StepShape]:
        """Those that an engine is to have before its first request, the largest of all first: decodes that draw without
        logits, prompts with nothing beside, behind not too many tokens, and what stands in for all with prefill."""
        shapes = [shape for shape in self.plain() if shape.deep <= DEEP]
        most = [self._largest._replace(adapted=adapted) for adapted in (False, True)]
        return [one for one in shapes if one in most or not (one.num_decodes and one.whole_logits)]

    def for_compilers(self) -> list[StepShape]:
        """Those that use all kernels there are: what comes after the model depends little on the number of rows. Those
        whose kernels take longest to compile are first."""
        ends = {self._decodes[0], self._decodes[-1]}
        extra = [shape for shape in self._decodes_of(*_EXTRA) if shape.num_decodes in ends]
        deep = [shape for shape in self.for_graphs() if shape.deep and not shape.num_decodes]
        plain = self.plain()
        sees = [shape._replace(with_images=True) for shape in plain if self._sees and shape.num_chunks]
        return list(dict.fromkeys([*self.for_warm_up(), *deep, *plain, *extra, *sees]))

    def can_have_graph(self, shape: StepShape) -> bool:
        """Whether a shape may be captured when it is met."""
        return not shape.of_prompts

    def stand_ins(self, shape: StepShape) -> list[StepShape]:
        """What may run a step with prefill and nothing extra, the best first: at last one of `for_start`."""
        extra = shape.adjusted or shape.logged or shape.of_prompts or shape.with_images
        if extra or not shape.num_chunks:
            return []
        less_deep = [shape._replace(deep=deep) for deep in (*self._depths_of(shape)[::-1], 0) if deep < shape.deep]
        return [*less_deep, self._largest._replace(adapted=shape.adapted)]

    def for_warm_up(self) -> list[StepShape]:
        """What the longest steps use beyond the kernels and the memory of graphs: to adjust logits, to tell
        log-probabilities. Of few requests steps with guesses have the most rows."""
        with_prompts = self._largest._replace(of_prompts=True, with_images=self._sees)
        longest = with_prompts, *self._trials[:1]
        return [
            shape._replace(whole_logits=True, adjusted=True, logged=True, adapted=self._adapted) for shape in longest
        ]

    def fit(
        self,
        num_decodes: int,
        num_chunks: int,
        num_tokens: int,
        whole_logits: bool = False,
        adjusted: bool = False,
        logged: bool = False,
        of_prompts: bool = False,
        *,
        depth: int = 0,
    ) -> StepShape:
        """The shape that a step is padded to. `whole_logits` and what follows: some row needs that; `depth`: tokens
        before the chunk that has most before it."""
        if not num_chunks:
            whole_logits |= adjusted or logged
            return StepShape(_smallest(self._decodes, num_decodes), 0, 0, whole_logits, adjusted, logged)
        chunks = _smallest(self._chunks, num_chunks)
        tokens = _smallest(self._tokens_of(chunks), num_tokens)
        padded = _smallest(self._decodes_beside(chunks, tokens), num_decodes)
        shape = self._with_chunks(padded, chunks, tokens)._replace(
            adjusted=adjusted, logged=logged, of_prompts=of_prompts
        )
        return shape._replace(deep=max((deep for deep in self._depths_of(shape) if deep <= depth), default=0))

    def of_length(self, shape: StepShape, longest: int) -> StepShape:
        """The shape for decode rows of so many tokens at most, where that makes a difference.

        Of a row alone it depends on the row's length alone: so do its bits, however its steps are planned.
        """
        trials = shape.num_trials
        lengths = self._lengths_of(trials) if trials else self._lengths.get(shape.num_decodes, ())
        if shape.num_chunks or not lengths or longest > lengths[-1]:
            return shape
        return shape._replace(longest=_smallest(lengths, longest))

    def _lengths_of(self, num_trials: int) -> tuple[int, ...]:
        """Of slots that try several tokens each, those that make a difference."""
        return next((lengths for slots, lengths in self._tried_lengths.items() if num_trials <= slots), ())

    def _decodes_of(self, *kinds: tuple[bool, bool, bool]) -> Iterator[StepShape]:
        """Steps without prefill. A row's bits may depend on the size: steps of all kinds have all sizes."""
        for size in self._decodes:
            for longest in _and_any(self._lengths.get(size, ())):
                for kind in kinds:
                    yield StepShape(size, 0, 0, *kind, longest=longest)

    def _halves(self) -> Iterator[StepShape]:
        """Of decodes whose masks are awaited."""
        for whole in self._decodes_of((True, True, False), (True, True, True)):
            yield whole.model
            yield whole.draw

    @property
    def _largest(self) -> StepShape:
        return self._with_chunks(self._most_decodes, self._chunks[-1], self._tokens[-1])

    def _tokens_of(self, chunks: int) -> list[int]:
        """Prefill tokens of the shapes of so many chunks: few tokens come in few chunks."""
        if chunks == self._chunks[0]:
            return self._tokens
        return [size for size in self._tokens if size >= min(_FEW_TOKENS, self._tokens[-1])]

    def _depths_of(self, shape: StepShape) -> list[int]:
        """The depths that make a difference to steps of this size."""
        if shape.num_chunks != self._chunks[0] or shape.of_prompts:
            return []
        return [deep for deep, tokens in self._most_deep.items() if shape.num_prefill_tokens <= tokens]

    def _decodes_beside(self, chunks: int, tokens: int) -> list[int]:
        """Decode rows of the shapes of so many chunks and prefill tokens."""
        sizes: tuple[int, ...]
        if chunks == self._chunks[0]:
            sizes = _DECODES_BESIDE_FEW if tokens <= _FEW_TOKENS else _DECODES_BESIDE
        else:
            sizes = _DECODES_BESIDE_MANY if chunks <= _CHUNKS[-1] else ()
        return [*(size for size in sizes if size < self._most_decodes), self._most_decodes]

    def _with_chunks(self, num_decodes: int, num_chunks: int, num_tokens: int) -> StepShape:
        """Steps with prefill have whole logits in any case: beside it that is little, and it halves graphs."""
        if num_tokens < _FEW_TOKENS:  # of more tokens one tile of rows is little, and they fill tiles of their own
            num_tokens = full_rows(num_decodes + num_tokens) - num_decodes
        return StepShape(num_decodes, num_chunks, num_tokens, whole_logits=True)


def _decode_sizes(max_num_seqs: int, fewest: int) -> list[int]:
    """One, and all full numbers of rows from `fewest` on, up to the first that holds so many: rows of padding cost next
    to nothing."""
    sizes = [1]
    while sizes[-1] < max_num_seqs:
        sizes.append(full_rows(max(sizes[-1] + 1, fewest)))
    return sizes


def _token_sizes(max_num_batched_tokens: int) -> list[int]:
    """Powers of 2, and at last what the longest step takes."""
    most = round_up(max(max_num_batched_tokens, _FEWEST_TOKENS), TOKENS_MULTIPLE)
    sizes = [_FEWEST_TOKENS]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return [*sizes, most]


def _and_any(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """These, and that of rows that are longer: 0, unless one of them is for those."""
    return lengths if LONG in lengths else (0, *lengths)


def _smallest(sizes: Sequence[int], at_least: int) -> int:
    return sizes[bisect_left(sizes, at_least)]
