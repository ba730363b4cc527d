"""Whether a text is what a form allows, as the library that computes masks sees it, token by token."""

import importlib
from typing import Any

from tokenizers import AddedToken

from tercet.engine.structured_check import check_compiles, write_grammar
from tercet.ipc.messages import Structured
from tokenizer_process import EOS, byte_tokenizer


def ids_of(marks: tuple[str, ...]) -> dict[str, int]:
    """In that tokenizer."""
    return {mark: EOS + 1 + place for place, mark in enumerate(marks)}


def fits(form: Structured, text: str, marks: tuple[str, ...] = (), *, special: bool = False) -> bool:
    """Of a tokenizer of bytes, and these tokens besides."""
    check_compiles(form)
    words = byte_tokenizer()
    words.add_tokens([AddedToken(mark, normalized=False, special=special) for mark in marks])
    library: Any = importlib.import_module("llguidance")
    tokenizer = library.LLTokenizer(words.to_str(), eos_token=[EOS])
    matcher = library.LLMatcher(tokenizer, write_grammar(form), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(token_id) for token_id in words.encode(text).ids) and matcher.is_accepting()
