"""Which tokens may come next in each answer that has a grammar.

The library's matchers are kept here, one for each such answer, under numbers that the caller chose; each writes its
masks into its row of a table. Knows token ids and bits, no request. Calls may take long: not for a loop that others
wait for. Compiled grammars are kept for those that come again.
"""

import functools
import importlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tercet.ipc.mask_table import num_mask_words

_MOST_KEPT = 64
_ITEMS_IN_ROW = 20_000
"""Alternatives that a grammar may have at one place: objects may have thousands of optional properties."""


class GrammarFailed(ValueError):
    """A grammar went beyond the library's limits, or no token goes on with it."""


class Grammars:
    """Matchers by number."""

    def __init__(self, tokenizer_json: str, eos_ids: Sequence[int], num_tokens: int, masks: NDArray[np.int32]) -> None:
        """`tokenizer_json`: as of the package tokenizers. `masks`: int32 words, a bit for each of `num_tokens` ids."""
        self._library = importlib.import_module("llguidance")
        ends = [token_id for token_id in eos_ids if 0 <= token_id < num_tokens]
        load = functools.partial(self._library.LLTokenizer, tokenizer_json, eos_token=ends)
        try:  # it writes as many bits as it has tokens
            self._tokenizer = load(n_vocab=num_tokens)
        except ValueError:  # it has more than the model
            self._tokenizer = load()
        self._masks, self._address = masks, masks.ctypes.data
        self._whole = np.zeros(num_mask_words(self._tokenizer.vocab_size), np.int32)
        """A mask with the tokens that the model lacks."""
        self._limits = self._library.LLParserLimits(max_items_in_row=_ITEMS_IN_ROW, verbose_errors=False)
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._matchers: dict[int, tuple[Any, int]] = {}

    def start(self, number: int, row: int, grammar: str, token_ids: Sequence[int]) -> None:
        """An answer begins, or goes on after these tokens of it. Its masks belong into this row."""
        base = self._compiled.pop(grammar, None)
        if base is None:
            base = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        self._compiled[grammar] = base
        if len(self._compiled) > _MOST_KEPT:
            self._compiled.popitem(last=False)
        matcher = base.deep_copy()
        self._matchers[number] = matcher, row
        if len(token_ids):
            matcher.consume_tokens(list(token_ids))

    def accept(self, number: int, token_id: int) -> None:
        """The answer's next token."""
        self._matchers[number][0].consume_token(token_id)

    def write_mask(self, number: int) -> None:
        """For each token id: may it come next? Raises `GrammarFailed`, also where none may."""
        matcher, row = self._matchers[number]
        num_words, num_bytes = self._masks.shape[1], self._whole.nbytes
        if len(self._whole) == num_words:
            matcher.unsafe_compute_mask_ptr(self._address + row * num_bytes, num_bytes)
        else:
            matcher.unsafe_compute_mask_ptr(self._whole.ctypes.data, num_bytes)
            self._masks[row] = self._whole[:num_words]
        if matcher.is_error():
            raise GrammarFailed(f"structured cannot be followed: {_first_line(matcher.get_error())}")

    def drop(self, number: int) -> None:
        """The answer is no longer wanted."""
        self._matchers.pop(number, None)


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:300]
