"""Sources that are found sooner are those that Python finds."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import triton

import tercet.triton_kernels as kernels
from tercet.model.quick_sources import _last_line, source_lines, tokenized


def functions() -> Iterator[Callable[..., object]]:
    """Of all kernels."""
    for found in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{found.name}")
        for value in vars(module).values():
            if isinstance(value, triton.runtime.jit.JITFunction):
                yield value.fn


def outer() -> Callable[[], int]:
    def inner() -> int:
        return 1

    return inner


def with_a_last_comment() -> int:
    return 1
    # Which is part of it.


def with_a_last_word() -> None:
    if with_a_last_comment() == 2:
        pass


def over_several_lines(
    one: int = 1,
    *others: int,
) -> tuple[int, ...]:
    return (
        one,
        *others,
    )


def test_sources_are_found_as_inspect_finds_them() -> None:
    found = list(functions())
    assert len(found) > 200
    for function in found:
        assert source_lines(function) == tokenized(function), function


@pytest.mark.parametrize(
    "function", [outer, outer(), with_a_last_comment, with_a_last_word, over_several_lines, functions, lambda: 1]
)
def test_of_other_functions_too(function: Callable[..., object]) -> None:
    assert source_lines(function) == tokenized(function)


def test_what_is_no_function_is_left_to_inspect() -> None:
    assert source_lines(Path) == tokenized(Path)
    with pytest.raises(OSError, match="source code"):
        source_lines(eval("lambda: 1"))
    assert _last_line(outer.__code__) > outer.__code__.co_firstlineno
