"""Masks of grammars, without a process around them."""

import random
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from numpy.typing import NDArray

from tercet.engine.grammars import GrammarFailed, Grammars
from tercet.engine.structured_check import write_grammar
from tercet.ipc.mask_table import create_mask_table, map_mask_table
from tercet.ipc.messages import Structured
from tokenizer_process import EOS, byte_tokenizer

END = 3
"""Some byte that no answer has."""
DIGITS = LLMatcher.grammar_from_regex("[0-9]{3,5}")


def table(num_rows: int, num_tokens: int) -> NDArray[np.int32]:
    """Nothing in it says what it should."""
    draw = np.random.default_rng()
    return draw.integers(-(2**31), 2**31, (num_rows, -(-num_tokens // 32))).astype(np.int32)


def ids_of(words_W: NDArray[np.int32]) -> list[int]:
    ids: list[int] = np.flatnonzero(np.unpackbits(words_W.view(np.uint8), bitorder="little")).tolist()
    return ids


def test_ends_that_the_model_does_not_have_are_left_out() -> None:
    """Some checkpoints say -1 where they have none."""
    tokenizer, masks = byte_tokenizer(), table(1, EOS + 1)
    grammars = Grammars(tokenizer.to_str(), [-1, EOS, 10**6], EOS + 1, masks)
    grammars.start(7, 0, write_grammar(Structured(choice=("a",))), [])
    for wanted in (tokenizer.token_to_id("a"), EOS):
        grammars.write_mask(7)
        assert ids_of(masks[0]) == [wanted]
        grammars.accept(7, wanted)


@pytest.mark.parametrize("num_tokens", [EOS + 1, EOS + 1000, 100])
def test_each_has_a_row_of_its_own(num_tokens: int) -> None:
    """Whether the model has as many tokens as its tokenizer, more, or fewer."""
    tokenizer, draw, masks = byte_tokenizer(), random.Random(num_tokens), table(30, num_tokens)
    grammars = Grammars(tokenizer.to_str(), [END, EOS], num_tokens, masks)
    rows = draw.sample(range(30), 20)
    said: dict[int, list[int]] = {row: [] for row in rows}
    digits = [tokenizer.token_to_id(digit) for digit in "0123456789"]
    ends = [END, EOS] if num_tokens > EOS else [END]
    for row in rows:
        grammars.start(100 + row, row, DIGITS, [])
    for count in range(6):
        before = masks.copy()
        for row in rows:
            grammars.write_mask(100 + row)
            assert ids_of(masks[row]) == sorted((ends if count > 2 else []) + (digits if count < 5 else []))
        others = [row for row in range(30) if row not in rows]
        assert np.array_equal(masks[others], before[others])
        for row in rows if count < 5 else []:
            said[row].append(draw.choice(digits))
            grammars.accept(100 + row, said[row][-1])
        row = draw.choice(rows)
        grammars.start(100 + row, row, DIGITS, said[row])  # as a successor would


def test_who_cannot_go_on() -> None:
    tokenizer = byte_tokenizer()
    grammars = Grammars(tokenizer.to_str(), [EOS], EOS + 1, table(2, EOS + 1))
    grammars.start(0, 0, "no grammar at all {", [])
    grammars.start(1, 1, DIGITS, [])
    with pytest.raises(GrammarFailed, match="structured cannot be followed"):
        grammars.write_mask(0)
    grammars.write_mask(1)
    grammars.accept(1, tokenizer.token_to_id("x"))
    with pytest.raises(GrammarFailed, match="structured cannot be followed"):
        grammars.write_mask(1)


def test_a_table_is_shared(tmp_path: Path) -> None:
    path = tmp_path / "masks"
    create_mask_table(path, 3, 33)
    assert path.stat().st_mode & 0o777 == 0o600
    written, read = map_mask_table(path, 33, writable=True), map_mask_table(path, 33)
    assert read.shape == (3, 2)
    written[1] = [-1, 5]
    create_mask_table(path, 3, 33)  # as somebody else would
    assert read.tolist() == [[0, 0], [-1, 5], [0, 0]] == map_mask_table(path, 33).tolist()
    assert list(tmp_path.iterdir()) == [path]
    path.unlink()
    assert read.tolist() == [[0, 0], [-1, 5], [0, 0]]
    with pytest.raises(ValueError, match="read-only"):
        read[0] = 1


def test_a_table_without_room(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        create_mask_table(tmp_path / "masks", 2**50, 320)
    assert not list(tmp_path.iterdir())
