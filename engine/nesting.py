"""How deep what a client sent is nested: what could be decoded may be too deep to be encoded again. Pure."""

from itertools import chain, compress, repeat
from operator import is_

MAX_LEVELS = 128
"""Of what goes to a chat template and has no shape of its own: tools, and arguments of their calls."""


def is_nested_deeper(value: object, most_levels: int) -> bool:
    """Level by level, as Python could not go down into everything that can come; and without a turn of Python for each
    of the millions of parts that a level may have.
    """
    level = [value]
    for _ in range(most_levels + 1):
        kinds = [*map(type, level)]
        lists = compress(level, map(is_, kinds, repeat(list)))
        dicts = compress(level, map(is_, kinds, repeat(dict)))
        level = [*chain.from_iterable(lists), *chain.from_iterable(map(dict.values, dicts))]  # type: ignore[arg-type]
        if not level:
            return False
    return True
