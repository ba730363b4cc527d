"""Which tokens may come next in each answer that has a grammar.

The library's matchers are kept here, one for each such answer, under numbers that the caller chose. Knows token ids and
bits, no request. Calls may take long: not for a loop that others wait for. Compiled grammars are kept for those that
come again.
"""

import importlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

_MOST_KEPT = 64
_ITEMS_IN_ROW = 20_000
"""Alternatives that a grammar may have at one place: objects may have thousands of optional properties."""


class GrammarFailed(ValueError):
    """A grammar went beyond the library's limits, or no token goes on with it."""


class Grammars:
    """Matchers by number."""

    def __init__(self, tokenizer_json: str, eos_ids: Sequence[int], num_tokens: int) -> None:
        """`tokenizer_json`: as of the package tokenizers. Masks have a bit for each of `num_tokens` ids."""
        self._library = importlib.import_module("llguidance")
        self._eos_ids = [token_id for token_id in eos_ids if 0 <= token_id < num_tokens]
        self._num_words = -(-num_tokens // 32)
        self._tokenizer = self._library.LLTokenizer(tokenizer_json, eos_token=self._eos_ids)
        self._limits = self._library.LLParserLimits(max_items_in_row=_ITEMS_IN_ROW, verbose_errors=False)
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._matchers: dict[int, Any] = {}

    def start(self, number: int, grammar: str, token_ids: Sequence[int]) -> None:
        """An answer begins, or goes on after these tokens of it."""
        base = self._compiled.pop(grammar, None)
        if base is None:
            base = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        self._compiled[grammar] = base
        if len(self._compiled) > _MOST_KEPT:
            self._compiled.popitem(last=False)
        self._matchers[number] = matcher = base.deep_copy()
        if len(token_ids):
            matcher.consume_tokens(list(token_ids))

    def accept(self, number: int, token_id: int) -> None:
        """The answer's next token."""
        self._matchers[number].consume_token(token_id)

    def mask(self, number: int) -> bytes:
        """int32 words with a bit for each token id: may it come next? Raises `GrammarFailed`."""
        matcher = self._matchers[number]
        words = np.zeros(self._num_words, np.int32)
        if not matcher.is_stopped():
            bits = np.frombuffer(matcher.compute_bitmask(), np.int32)[: self._num_words]
            words[: len(bits)] = bits
        if matcher.is_error():
            raise GrammarFailed(f"structured cannot be followed: {_first_line(matcher.get_error())}")
        if not words.any():
            if not matcher.is_accepting():
                raise GrammarFailed("structured cannot be followed: no token of this model goes on with the grammar")
            for token_id in self._eos_ids:  # it is complete: all that is left is to end
                words.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
        return words.tobytes()

    def drop(self, number: int) -> None:
        """The answer is no longer wanted."""
        self._matchers.pop(number, None)


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:300]
