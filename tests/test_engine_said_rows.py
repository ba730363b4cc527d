"""Log-probabilities of the parts of an answer: each token's with the part that it says, however both are cut."""

import random
from collections.abc import Sequence

import pytest

from tercet.engine.said_rows import SaidRows
from tercet.ipc.answers import TokenLogprob

Row = Sequence[TokenLogprob]


def row(number: int, token: bytes) -> Row:
    return (TokenLogprob(number, -1.0, 1, token),)


def cut(text: bytes, draw: random.Random) -> list[Row]:
    """Tokens of any length, some of which are parts of a character."""
    rows: list[Row] = []
    while text:
        length = draw.choice((1, 1, 2, 3, 5))
        rows.append(row(len(rows), text[:length]))
        text = text[length:]
    return rows


def whole_at(text: bytes, end: int) -> int:
    """Characters that are whole with so many bytes."""
    return len(text[:end].decode(errors="ignore"))


@pytest.mark.parametrize("seed", range(40))
def test_each_part_has_its_tokens(seed: int) -> None:
    draw = random.Random(seed)
    parts = [
        ("<think>", False), ("Hm. Größe?", True), ("</think>\n\n", False), ("Hm. Größe: 東京.", True),
        ("<tool_call>{}</tool_call>", False), (" And?", True),
    ]  # fmt: skip
    text = "".join(written for written, _ in parts)
    rows, said = cut(text.encode(), draw), SaidRows()
    if draw.random() < 0.5:  # all at once, or the text some tokens behind
        said.feed(text, rows)
    else:
        half, place = len(text) // 2, draw.randrange(len(rows))
        said.feed("", rows[:place])
        said.feed(text[:half], rows[place:])
        said.feed(text[half:], [])
    # Where in the text a token begins and ends: one that ends no character does so where the next one does.
    sizes = [len(one[0].token) for one in rows]
    places = [whole_at(text.encode(), sum(sizes[:n])) for n in range(len(rows) + 1)]
    spans = [(start, next(end for end in places if end > start)) for start in places[:-1]]
    begin, told = 0, set[int]()
    for written, is_told in parts:
        end = begin + len(written)
        if is_told:
            got = [one[0].token_id for one in said.take(written)]
            within = [n for n, (first, last) in enumerate(spans) if first < end and last > begin]
            assert got == [n for n in within if n not in told]
            told |= set(got)
        begin = end
    assert said.take("") == []


def test_a_part_whose_place_is_known() -> None:
    """The same words may stand elsewhere."""
    said = SaidRows()
    said.feed("final<m>final", [row(n, token) for n, token in enumerate((b"fi", b"nal", b"<m>", b"fin", b"al"))])
    assert [one[0].token_id for one in said.take_at(8, 13)] == [3, 4]


def test_what_a_text_leaves_out() -> None:
    """Its first space, tokens that are not shown; and bytes that are no character, which are one or one each."""
    for shown in ("Hello \ufffd you", "Hello \ufffd\ufffd you"):
        said = SaidRows()
        tokens = (b" Hello", b"<|hidden|>", b" ", b"\xe2", b"\x82", b" you", b"<|end|>")
        said.feed(shown, [row(n, token) for n, token in enumerate(tokens)])
        assert [one[0].token_id for one in said.take("Hello")] == [0]
        assert [one[0].token_id for one in said.take(shown[5:])] == [1, 2, 3, 4, 5]


def test_an_answer_that_ends_within_a_character() -> None:
    said = SaidRows()
    said.feed("Hi", [row(0, b"Hi")])
    assert [one[0].token_id for one in said.take("Hi")] == [0]
    said.feed("", [row(1, b"\xf0")])
    said.feed("\ufffd", [row(2, b"\x9f")])
    assert [one[0].token_id for one in said.take("\ufffd")] == [1, 2]
