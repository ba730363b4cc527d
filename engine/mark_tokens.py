"""Which marks of a format are tokens of their own, as the tokenizer says. It knows no format and no HTTP."""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from tercet.engine.lark import Marks

Tokenize = Callable[[str], Awaitable[list[int]]]


async def find_marks(tokenize: Tokenize, candidates: Iterable[str]) -> Marks:
    """Those that are: a grammar has to name them and takes no such token for its spelling, and readers tell one from
    a text that spells it."""
    marks = {}
    for mark in candidates:
        # What the tokenizer adds, such as a beginning of sequence, is there both times.
        added = Counter(await tokenize(mark * 2)) - Counter(await tokenize(mark))
        if added.total() == 1:
            (marks[mark],) = added
    return marks
