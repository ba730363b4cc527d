"""Sources of functions, found sooner: half a second of a worker's start went to the tokens of kernels' sources.

Triton asks `inspect` for the source of each kernel and of each function that kernels call, hundreds of them, when it
decorates them; and `inspect` has Python's tokenizer, which is written in Python, look for the end of each. Code knows
the line where it ends; where that might not be all, `inspect` is asked as ever. Knows no kernel, and not Triton.
"""

import inspect
import linecache
from types import CodeType, FunctionType
from typing import Any

tokenized = inspect.getsourcelines
"""As Python has it."""


def quicken_sources() -> None:
    """For all that is imported from here on in this process, which is ours alone."""
    inspect.getsourcelines = source_lines  # type: ignore[assignment]


def source_lines(thing: Any) -> tuple[list[str], int]:
    """What `inspect.getsourcelines` says."""
    if type(thing) is FunctionType and not hasattr(thing, "__wrapped__"):
        code = thing.__code__
        first, last = code.co_firstlineno, _last_line(code)
        lines = linecache.getlines(code.co_filename, thing.__globals__)
        if first <= last <= len(lines) and _ends_there(lines, first, last):
            return lines[first - 1 : last], first
    return tokenized(thing)


def _last_line(code: CodeType) -> int:
    inner = [_last_line(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return max([end or 0 for _, end, _, _ in code.co_positions()] + inner)


def _ends_there(lines: list[str], first: int, last: int) -> bool:
    """Whether nothing of the function can follow that made no code, a comment for example."""
    margin = _indentation(lines[first - 1])
    following = next((line for line in lines[last:] if line.strip()), None)
    return following is None or (_indentation(following) <= margin and following.lstrip()[0] not in ")]}\"'#")


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())
