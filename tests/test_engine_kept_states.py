"""Places for copies of states: none is given twice at a time, and the least recently used goes first."""

import random

from tercet.engine.kept_states import KeptStates


def names(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def test_places_are_numbered_from_the_first_on() -> None:
    assert KeptStates(9, 3).keep(names(1, 2, 3)) == {b"1": 9, b"2": 10, b"3": 11}


def test_the_least_recently_used_goes_first() -> None:
    kept = KeptStates(0, 3)
    kept.keep(names(1, 2, 3))
    assert kept.use(b"1") == 0
    assert kept.keep(names(2)) == {}, "it is there already, and wanted again"
    assert kept.keep(names(4)) == {b"4": 2}
    assert kept.keep(names(5)) == {b"5": 0}
    assert [name in kept for name in names(1, 2, 3, 4, 5)] == [False, True, False, True, True]


def test_what_is_given_at_the_same_time_stays() -> None:
    kept = KeptStates(0, 2)
    kept.keep(names(1, 2))
    assert kept.keep(names(3, 4, 5)) == {b"3": 0, b"4": 1}
    assert kept.keep(names(6, 3, 7)) == {b"6": 1}  # 3 was wanted again, and is younger than 6
    assert kept.keep(names(7)) == {b"7": 1}


def test_what_is_held_makes_no_way() -> None:
    kept = KeptStates(0, 2)
    kept.keep(names(1, 2))
    kept.hold(b"1")
    kept.hold(b"1")
    assert kept.keep(names(3)) == {b"3": 1}
    kept.hold(b"3")
    assert not kept.has_room
    assert kept.keep(names(4)) == {}
    kept.let_go(b"1")
    assert not kept.has_room
    kept.let_go(b"1")
    assert kept.has_room
    assert kept.keep(names(4)) == {b"4": 0}
    assert [name in kept for name in names(1, 2, 3, 4)] == [False, False, True, True]


def test_a_place_that_is_taken_is_nobody_s_until_the_state_came() -> None:
    kept = KeptStates(0, 2)
    kept.keep(names(1, 2))
    assert (kept.take(), kept.take()) == (0, 1)
    assert not kept.has_room
    assert kept.keep(names(3)) == {}
    kept.came(b"1", 0)
    assert (kept.at(b"1"), kept.at(b"2")) == (0, None)
    kept.came(b"1", 1)  # it was there meanwhile
    assert kept.keep(names(3)) == {b"3": 1}
    assert kept.use(b"1") == 0


def test_no_places_keep_nothing() -> None:
    kept = KeptStates(5, 0)
    assert kept.keep(names(1)) == {}
    assert b"1" not in kept


def test_long_histories_read_what_was_written_last() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        first, count = draw.randint(0, 5), draw.randint(1, 6)
        kept = KeptStates(first, count)
        written: dict[int, bytes] = {}
        held: list[bytes] = []
        taken: list[int] = []
        for _ in range(300):
            given = kept.keep(names(*draw.sample(range(12), draw.randint(0, 4))))
            assert len(set(given.values())) == len(given)
            assert set(given.values()) <= set(range(first, first + count)) - set(taken)
            assert not {written.get(place) for place in given.values()} & set(held)
            written |= {place: name for name, place in given.items()}
            if draw.random() < 0.2 and kept.has_room:
                taken.append(kept.take())
                assert written.pop(taken[-1], None) not in held
            elif draw.random() < 0.3 and taken:
                name, place = names(draw.randrange(12))[0], taken.pop(draw.randrange(len(taken)))
                if name not in kept:
                    written[place] = name
                kept.came(name, place)
            there = [name for name in names(*range(12)) if name in kept]
            assert len(there) == len(written) <= count - len(taken)
            assert all(name in kept for name in held)
            if draw.random() < 0.3 and there:
                held.append(draw.choice(there))
                kept.hold(held[-1])
            elif draw.random() < 0.4 and held:
                kept.let_go(held.pop(draw.randrange(len(held))))
            for name in draw.sample(there, draw.randint(0, len(there))):
                assert written[kept.use(name)] == name
