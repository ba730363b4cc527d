"""Decoded images that are kept: how many, and which go first. Pure."""

from tercet.engine.images import Pixels
from tercet.engine.kept_images import KeptImages


def test_few_bytes_are_kept() -> None:
    kept = KeptImages(100)
    names = [bytes([number]) for number in range(4)]
    for name in names[:3]:
        kept.keep(name, Pixels(2, 5, bytes(30)))
    assert kept.find(names[0]) is not None  # the youngest by that
    kept.keep(names[3], Pixels(2, 5, bytes(30)))
    assert [kept.find(name) is None for name in names] == [False, True, False, False]
    kept.keep(names[1], Pixels(2, 500, bytes(3000)))
    assert (kept.find(names[1]), kept.num_bytes) == (None, 90)
