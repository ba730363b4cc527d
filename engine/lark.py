"""Lark's notation, in which grammars are written for the library that computes masks."""

import json


def named(mark: str, marks: frozenset[str]) -> str:
    """The token, or its spelling where it is none. `marks`: those that are tokens."""
    return mark if mark in marks else json.dumps(mark)
