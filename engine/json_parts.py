"""A JSON text whose long lists are made while it is sent, some elements at a time. Pure; it knows no list's purpose."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import msgspec

Item = TypeVar("Item")
LATER: Any = msgspec.Raw(b"\0")
"""Stands for a value that is made later: a byte that no JSON has."""
_AT_ONCE = 256
"""Of elements that take up to 50 us each: nobody else gets a turn before they are made."""

encode = msgspec.json.Encoder().encode


def in_runs(items: Sequence[Item], convert: Callable[[Item], object]) -> Iterator[bytes]:
    """Elements of a list, some at a time, with commas between them."""
    for begin in range(0, len(items), _AT_ONCE):
        yield run([convert(item) for item in items[begin : begin + _AT_ONCE]])


def run(elements: list[Any]) -> bytes:
    """As they stand in a list, without its brackets."""
    return encode(elements)[1:-1]


def as_list(*runs: Iterable[bytes]) -> Iterator[bytes]:
    """One list of them all."""
    before = b"["
    for part in chain(*runs):
        yield before
        yield part
        before = b","
    yield b"[]" if before == b"[" else b"]"


def in_parts(text: bytes, later: Sequence[Iterable[bytes]]) -> Iterator[bytes]:
    """An encoded object, and in their order what its values are that have been put off."""
    first, *others = text.split(b"\0")
    yield first
    for value, rest in zip(later, others, strict=True):
        yield from value
        yield rest
