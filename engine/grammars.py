"""Which tokens may come next in each request that has a grammar, for the scheduler's plans.

The library's matchers are kept here, one for each running request that has a grammar. Knows token ids and bits; what
a plan is, the planner knows. Compiled grammars are kept for those that come again.
"""

import importlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

_MOST_KEPT = 64


class Grammars:
    """Matchers by request number."""

    def __init__(self, tokenizer_json: str, eos_ids: Sequence[int]) -> None:
        """`tokenizer_json`: as of the package tokenizers."""
        self._library = importlib.import_module("llguidance")
        self._eos_ids = list(eos_ids)
        self._tokenizer = self._library.LLTokenizer(tokenizer_json, eos_token=self._eos_ids)
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._matchers: dict[int, Any] = {}

    def start(self, number: int, grammar: str, token_ids: Sequence[int]) -> None:
        """A request begins, or goes on after these tokens of its answer."""
        base = self._compiled.pop(grammar, None)
        if base is None:
            base = self._library.LLMatcher(self._tokenizer, grammar)
        self._compiled[grammar] = base
        if len(self._compiled) > _MOST_KEPT:
            self._compiled.popitem(last=False)
        self._matchers[number] = matcher = base.deep_copy()
        if len(token_ids):
            matcher.consume_tokens(list(token_ids))

    def accept(self, number: int, token_id: int) -> None:
        """The request's next token."""
        self._matchers[number].consume_token(token_id)

    def mask(self, number: int, num_tokens: int) -> bytes:
        """int32 words with a bit for each of `num_tokens` ids: may it come next?"""
        matcher = self._matchers[number]
        words = np.zeros(-(-num_tokens // 32), np.int32)
        if not matcher.is_stopped() and not matcher.is_error():
            bits = np.frombuffer(matcher.compute_bitmask(), np.int32)[: len(words)]
            words[: len(bits)] = bits
        if not words.any():  # it is complete, or went beyond the library's limits: all that is left is to end
            for token_id in self._eos_ids:
                words.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
        return words.tobytes()

    def drop(self, number: int) -> None:
        """The request is gone, or waits to begin again."""
        self._matchers.pop(number, None)


def no_grammars() -> Grammars:
    """For those who never get a request that has one."""
    raise AssertionError("a request has a grammar, and there is no tokenizer to read it with")
