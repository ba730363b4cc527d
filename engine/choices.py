"""What a place in a message may hold where that is one of a few values, for who was told only what it may not.

Knows types as msgspec describes them, and its way to write a path into a message; knows no field.
"""

import re
from collections.abc import Iterator

from msgspec import inspect

_STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")


def choices(kind: type, path: str) -> list[object]:
    """The values at `path` (as in `messages[0].role`) of a `kind`, in the order of the type that lists them."""
    types = [inspect.type_info(kind)]
    for step in _STEP.findall(path):
        types = [inner for one in types for inner in _inside(one, step)]
    return [value for one in types for value in _values(one)]


def _inside(of: inspect.Type, step: str) -> Iterator[inspect.Type]:
    match of:
        case inspect.UnionType():
            for one in of.types:
                yield from _inside(one, step)
        case inspect.StructType():
            yield from (field.type for field in of.fields if field.encode_name == step)
            if step == of.tag_field:
                yield inspect.LiteralType((of.tag,))
        case inspect.ListType():
            yield of.item_type
        case inspect.DictType():
            yield of.value_type


def _values(of: inspect.Type) -> Iterator[object]:
    match of:
        case inspect.UnionType():
            for one in of.types:
                yield from _values(one)
        case inspect.LiteralType():
            yield from of.values
        case inspect.EnumType():
            yield from (one.value for one in of.cls)
