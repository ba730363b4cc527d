"""Places in the host's memory: one for each page, none to two, and whose turn it is to go."""

import random

import pytest

from tercet.engine.host_pages import HostPages


def names(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def stored(pages: HostPages, text: str) -> list[int]:
    places = [pages.store(name) for name in names(text)]
    pages.stored(names(text))
    assert None not in places
    return places  # type: ignore[return-value]


def test_a_page_is_there_when_it_is_stored() -> None:
    pages = HostPages(2)
    place = pages.store(b"a")
    assert place is not None
    assert b"a" in pages
    assert not pages.holds(b"a")
    pages.stored([b"a"])
    assert pages.holds(b"a")
    assert pages.read(b"a") == place


def test_the_least_recently_used_goes_and_the_end_of_a_prefix_first() -> None:
    pages = HostPages(4)
    stored(pages, "abc")
    stored(pages, "x")
    stored(pages, "y")
    assert [name in pages for name in names("abcxy")] == [True, True, False, True, True]
    pages.use(names("ab"))
    stored(pages, "z")
    assert [name in pages for name in names("abxyz")] == [True, True, False, True, True]
    pages.use(names("missing"))  # of which nothing is here


def test_what_is_read_or_written_stays() -> None:
    pages = HostPages(3)
    first = stored(pages, "abc")
    assert [pages.read(name) for name in names("abb")] == [first[0], first[1], first[1]]
    assert pages.store(b"d") == first[2]
    assert pages.store(b"e") is None
    pages.was_read(names("ab"))
    assert pages.store(b"e") == first[0]
    assert pages.store(b"f") is None
    assert pages.holds(b"b")
    pages.was_read(names("b"))
    assert pages.store(b"f") == first[1]


@pytest.mark.parametrize("seed", range(10))
def test_no_place_is_two_pages(seed: int) -> None:
    draw, pages = random.Random(seed), HostPages(draw_count := 5)
    held: dict[bytes, int] = {}
    coming: list[bytes] = []
    reading: list[bytes] = []
    for _ in range(500):
        name = bytes([draw.randrange(12)])
        match draw.randrange(4):
            case 0 if name not in pages and (place := pages.store(name)) is not None:
                gone = [one for one, where in held.items() if where == place]
                assert not set(gone) & {*coming, *reading}
                for one in gone:
                    del held[one]
                held[name] = place
                coming.append(name)
            case 1 if coming:
                pages.stored([coming.pop()])
            case 2 if pages.holds(name):
                assert pages.read(name) == held[name]
                reading.append(name)
            case 3 if reading:
                pages.was_read([reading.pop(draw.randrange(len(reading)))])
        assert len(set(held.values())) == len(held) <= draw_count
        assert all(pages.holds(one) == (one not in coming) for one in held)
        assert not any(bytes([number]) in pages for number in range(12) if bytes([number]) not in held)
