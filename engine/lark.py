"""Lark's notation, in which grammars are written for the library that computes masks. Pure."""

import json
import re
from collections.abc import Mapping
from typing import Any

from tercet.engine.refusal import invalid
from tercet.engine.structured_check import JSON_DEFAULTS, JSON_OVERRIDES, check_form, check_schema, regex_of
from tercet.ipc.messages import Structured

Marks = Mapping[str, int]
"""Texts that are tokens of their own, and their ids."""


def named(mark: str, marks: Marks) -> str:
    """The token, or its spelling where it is none. By its id: only names in angle brackets can be written as names."""
    return f"<[{marks[mark]}]>" if mark in marks else json.dumps(mark)


def in_lark(form: Structured) -> str:
    """What `form` allows, as part of a rule. Raises `Refusal`."""
    check_form(form)
    if form.json_object:
        return _json({"type": "object"})
    if form.json_schema is not None:
        return _json(_schema(form.json_schema))
    if form.regex is not None:
        return in_slashes(form.regex)
    if form.choice is not None:
        return in_slashes(regex_of(form.choice))
    return f"%lark {{\n{form.grammar}\n}}"


def _json(schema: dict[str, Any]) -> str:
    asked = schema.get("x-guidance", {})
    if not isinstance(asked, dict):
        raise invalid("structured json_schema", f"one whose x-guidance is {asked!r}", "an object there")
    return "%json " + json.dumps({**schema, "x-guidance": {**JSON_DEFAULTS, **asked, **JSON_OVERRIDES}})


def _schema(given: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        schema = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise invalid("structured json_schema", f"no JSON ({error})", "a schema") from None
    if not isinstance(schema, dict):
        raise invalid("structured json_schema", given, "an object")
    check_schema(schema)
    return schema


def in_slashes(regex: str) -> str:
    """As part of a rule, in one line."""
    written = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return "/" + re.sub(r"\\?.", lambda found: written.get(found[0], found[0]), regex, flags=re.DOTALL) + "/"
