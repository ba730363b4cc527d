"""Answers in the harmony format, read back whole and cut at every place, with marks that are tokens and without."""

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest

from tercet.engine.harmony import MARKS, HarmonyReader
from tercet.engine.said import Said
from tercet.engine.tool_calls import Call

IDS = {mark: 1000 + place for place, mark in enumerate(MARKS)}
NAMES = {mark.strip("<|>"): mark for mark in MARKS}
F = Call("f", '{"a": 1}')
THOUGHT = "{channel}analysis{message}Hm: <|x|>é.{end}{start}assistant"
Wanted = tuple[str, str, list[Call]]
"""Reasoning, content, calls."""
CASES: list[tuple[str, Wanted]] = [
    ("{channel}final{message}Hello.{return}", ("", "Hello.", [])),
    (THOUGHT + "{channel}final{message}Hello.{return}", ("Hm: <|x|>é.", "Hello.", [])),
    (THOUGHT + "{channel}final{message}Hello.", ("Hm: <|x|>é.", "Hello.", [])),
    ("{channel}analysis{message}It nev", ("It nev", "", [])),
    # A call: with its recipient on either side of the channel, with its kind or without, and in the wrong channel.
    *(
        (THOUGHT + f'{header}{{message}}{{{{"a": 1}}}}{{call}}', ("Hm: <|x|>é.", "", [F]))
        for header in (
            "{channel}commentary to=functions.f {constrain}json",
            "{channel}commentary to=functions.f{constrain}json",
            "{channel}commentary to=functions.f json",
            "{channel}commentary to=functions.f",
            " to=functions.f{channel}commentary json",
            " to=functions.f{channel}commentary {constrain}json",
            " to=functions.f{channel}analysis",
            " to=functions.f",
            "{channel}commentary functions.f{constrain}json",
            "{channel}commentary to=f {constrain}json",
            "{channel}commentary to=functions.f {constrain}",
        )
    ),
    (
        "{channel}commentary{message}Let me see.{end}{start}assistant{channel}commentary to=functions.f {constrain}json"
        '{message}{{"a": 1}}{end}{start}assistant to=functions.g.h{channel}commentary{message}{{}}{call}',
        ("", "Let me see.", [F, Call("g.h", "{}")]),
    ),
    ("{channel}commentary to=functions.f{message}{call}", ("", "", [Call("f", "{}")])),
    # What cannot be called.
    ('{channel}commentary to=functions.f{message}{{"a": {call}', ("", '{"a": ', [])),
    ("{channel}commentary to=functions.f{message}[1]{call}", ("", "[1]", [])),
    ("{channel}commentary to=functions.{message}{{}}{call}", ("{}", "", [])),
    ('{channel}commentary to=python code{message}print("x"){call}', ('print("x")', "", [])),
    ('{channel}analysis to=browser.search{message}{{"q": 1}}{call}', ('{"q": 1}', "", [])),
    # Several messages of a kind are lines of their own.
    (
        "{channel}analysis{message}A{end}{start}assistant{channel}commentary{message}B{end}{start}assistant"
        "{channel}analysis{message}C{end}{start}assistant{channel}final{message}D{return}",
        ("A\nC", "B\nD", []),
    ),
    # Headers that models get wrong.
    ("{channel}final to=user{message}Hi{return}", ("", "Hi", [])),
    ("{channel}final {constrain}json{message}{{}}{return}", ("", "{}", [])),
    ("{channel}analysis code{message}x{end}", ("x", "", [])),
    ("{channel}commentaryjson{message}x{end}", ("", "x", [])),
    ("{channel}summary{message}x{end}", ("", "x", [])),
    ("{channel}{message}x{end}", ("", "x", [])),
    ("{message}x{end}", ("", "x", [])),
    ("{channel}analysis{channel}final{message}x{end}", ("", "x", [])),
    ("{start}assistant{channel}final{message}x{end}", ("", "x", [])),
    ("{channel}analysis{message}A{channel}final{message}B{return}", ("A", "B", [])),
    ("{channel}analysis{message}A{start}assistant{channel}final{message}B{return}", ("A", "B", [])),
    ("{channel}analysis{message}A{end}assistant{channel}final{message}B{return}", ("A", "B", [])),
    ("{channel}analysis{message}A{end}{channel}final{message}B{return}", ("A", "B", [])),
    ("{channel}final{message}{message}A{constrain}B{return}{return}", ("", "AB", [])),
    ("{channel}final{message}A{end}{start}user{message}More?{end}", ("More?", "A", [])),
    (
        "{channel}final{message}A{end}{start}functions.f to=assistant{channel}commentary{message}7{end}",
        ("7", "A", []),
    ),
    # Headers without an end.
    ("", ("", "", [])),
    ("Hello there", ("", "Hello there", [])),
    (" x" * 400, ("", " x" * 400, [])),
    ("{channel}" + "final " * 200 + "{message}x", ("", "final " * 199 + "x", [])),
    ("{channel}anal", ("", "", [])),
    ("{channel}commentary to=functions.f {constrain}js", ("", "", [])),
    ("{channel}final The answer.{return}", ("", "The answer.", [])),
    ("{channel}analysis Hm.{end}{start}assistant{channel}final{message}x", ("Hm.", "x", [])),
    ('{channel}commentary to=functions.f {constrain}json {{"a": 1}}{call}', ("", "", [F])),
    (THOUGHT + "Hello there{return}", ("Hm: <|x|>é.", "Hello there", [])),
    ("Hello{start}assistant{channel}final{message}x", ("", "Hello\nx", [])),
]


def tokens(text: str, *, tokenized: bool) -> list[tuple[str, list[int]]]:
    """A mark is one, and so is any character."""
    pieces: list[tuple[str, list[int]]] = []
    at = 0
    while at < len(text):
        mark = next((mark for mark in MARKS if text.startswith(mark, at)), None) if tokenized else None
        piece = text[at] if mark is None else mark
        pieces.append((piece, [IDS.get(piece, 1)]))
        at += len(piece)
    return pieces


def cuts(pieces: Sequence[tuple[str, list[int]]]) -> list[list[tuple[str, list[int]]]]:
    """The whole, one token at a time, every cut in two, some in many; and with texts that come behind their tokens."""
    rng = random.Random(len(pieces))
    places = [sorted(rng.sample(range(len(pieces) + 1), min(5, len(pieces)))) for _ in range(10)]
    ways = [[*range(len(pieces))], *([place] for place in range(len(pieces))), *places]
    cut = [[joined(pieces[a:b]) for a, b in zip([0, *places], [*places, len(pieces)], strict=True)] for places in ways]
    text = "".join(text for text, _ in pieces)
    late = [("", [token_id]) for _, (token_id,) in pieces]
    return [*cut, [*late, *((letter, []) for letter in text)]]


def joined(pieces: Sequence[tuple[str, list[int]]]) -> tuple[str, list[int]]:
    return "".join(text for text, _ in pieces), [token_id for _, ids in pieces for token_id in ids]


def read(pieces: Sequence[tuple[str, list[int]]], marks: Any = IDS, **more: Any) -> tuple[HarmonyReader, list[Said]]:
    reader = HarmonyReader(marks, ["f"], **{"reads_calls": True, "goes_on": False, **more})
    said = [one for text, ids in pieces for one in reader.feed(text, ids)]
    return reader, [*said, *reader.finish()]


def told(said: Sequence[Said]) -> Wanted:
    calls = [one.call for one in said if one.call is not None]
    return "".join(one.reasoning for one in said), "".join(one.content for one in said), calls


@pytest.mark.parametrize(("form", "wanted"), CASES)
@pytest.mark.parametrize("tokenized", [True, False])
def test_messages_however_they_are_cut(form: str, wanted: Wanted, tokenized: bool) -> None:
    text = form.format_map(NAMES)
    for pieces in cuts(tokens(text, tokenized=tokenized)):
        _, said = read(pieces, IDS if tokenized else {})
        assert told(said) == wanted, pieces
        for one in said:
            if one.call is None:
                assert one.span is not None
                assert text[slice(*one.span)] in (one.reasoning + one.content, "")


@pytest.mark.parametrize("place", ["{channel}analysis{message}A SPELLED B{end}{start}assistant", ""])
@pytest.mark.parametrize("spelled", MARKS)
def test_a_mark_that_is_spelled_is_text(place: str, spelled: str) -> None:
    """By tokens that are not its own. In an answer that comes at once, too."""
    text = (place + "{channel}final{message}C SPELLED D{return}").format_map(NAMES)
    pieces = [one for part in text.split("SPELLED") for one in [*tokens(part, tokenized=True), (spelled, [2, 3])]][:-1]
    for cut in cuts([(text, ids[:1]) for text, ids in pieces]):
        reasoning, content, calls = told(read(cut)[1])
        assert (reasoning, content, calls) == (f"A {spelled} B" if place else "", f"C {spelled} D", []), cut


@pytest.mark.parametrize("seed", range(100))
def test_whatever_comes_is_read_and_no_body_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    words = (
        *MARKS,
        *MARKS,
        "<|channel|>final<|message|>",
        "assistant",
        " to=functions.f",
        " to=x",
        "analysis",
        "{}",
        " ",
    )
    text = "".join(rng.choice((*words, f"[{n}]")) for n in range(rng.randrange(40)))
    pieces = tokens(text, tokenized=True)
    whole = read([joined(pieces)])[1]
    for cut in (pieces, *(cuts(pieces)[-8:-1])):
        assert told(read(cut)[1]) == told(whole), text
    spans = [one.span for one in whole if one.span is not None]
    assert spans == sorted(spans)
    for body in re.findall(r"<\|message\|>([^<]+)", text):
        reasoning, content, calls = told(whole)
        assert body in reasoning + "|" + content or (body.strip() == "{}" and calls), (text, body)


def test_the_end_of_an_answer_has_a_token_and_no_text() -> None:
    """And a call that max_tokens has cut, neither."""
    text = "{channel}commentary to=functions.f{message}".format_map(NAMES)
    pieces = tokens(text, tokenized=True)
    assert told(read([*pieces, ("", [IDS["<|call|>"]])])[1]) == ("", "", [Call("f", "{}")])
    assert told(read(pieces)[1]) == ("", "", [])


def test_what_is_clear_is_told_at_once() -> None:
    reader = HarmonyReader(IDS, [], reads_calls=True, goes_on=False)
    for text, ids in tokens("{channel}final{message}".format_map(NAMES), tokenized=True):
        assert reader.feed(text, ids) == []
    for text in ("Hel", "lo <", "|en"):
        assert [one.content for one in reader.feed(text, [1])] == [text]


def test_calls_that_nobody_reads_are_content() -> None:
    text = THOUGHT + '{channel}commentary to=functions.f{message}{{"a": 1}}{call}'
    pieces = tokens(text.format_map(NAMES), tokenized=True)
    assert told(read(pieces, reads_calls=False)[1]) == ("Hm: <|x|>é.", '{"a": 1}', [])


def test_an_answer_that_goes_on() -> None:
    text = "lo.{end}{start}assistant{channel}analysis{message}Hm.{end}".format_map(NAMES)
    reader, said = read(tokens(text, tokenized=True), goes_on=True)
    assert told(said) == ("Hm.", "lo.", [])
    assert reader.num_thought(joined(tokens(text, tokenized=True))[1]) == 5 + len("assistantanalysisHm.") - 1


def test_how_many_tokens_are_reasoning() -> None:
    parts = [
        ("{channel}analysis{message}Hm.{end}", True),
        ("{start}assistant{channel}commentary{message}Wait.{end}", False),
        ("{start}assistant{channel}analysis{message}More.", True),
        ("{channel}final{message}x{return}", False),
    ]
    ids = [joined(tokens(part.format_map(NAMES), tokenized=True)) for part, _ in parts]
    text, whole = "".join(text for text, _ in ids), [one for _, own in ids for one in own]
    wanted = sum(len(own) for (_, own), (_, thinks) in zip(ids, parts, strict=True) if thinks)
    for pieces in cuts(tokens(text, tokenized=True)):
        assert read(pieces)[0].num_thought(whole) == wanted
    assert read([(text, [])], {})[0].num_thought(whole) is None
