"""Answers that have a form from the end of the model's reasoning on, whether or not the prompt has opened that.

Pure; it knows the notation of grammars and no HTTP.
"""

import json
import re
from typing import Any

from tercet.engine.lark import named
from tercet.engine.reasoning import CLOSE, OPEN
from tercet.engine.refusal import invalid
from tercet.engine.structured_check import JSON_DEFAULTS, JSON_OVERRIDES, check_form, check_schema, regex_of
from tercet.ipc.messages import Structured

_TO_TOKEN = f"thought: text {CLOSE} gap\ntext: /(.|\\n)*/\n"
_TO_SPELLED = "thought: text gap\ntext[lazy]: /(.|\\n)*<\\/think>/\n"  # lazy: the first end is the end
_GAP = "gap: /[ \\n]{0,4}/\n"
"""Models leave lines free there; as many as they like could be all that max_tokens has room for."""


def after_thought(form: Structured, marks: frozenset[str], *, opened: bool) -> Structured:
    """Any text to the end of the reasoning, then what `form` allows. Raises `Refusal`.

    `marks`: these are tokens. Unless the prompt has `opened` the reasoning, the answer may, or have its form at once.
    """
    check_form(form)
    start = "start: thought answer\n" if opened else f"start: answer | {named(OPEN, marks)} thought answer\n"
    thought = _TO_TOKEN if CLOSE in marks else _TO_SPELLED
    return Structured(grammar=f"{start}{thought}{_GAP}answer: {_in_lark(form)}\n")


def _in_lark(form: Structured) -> str:
    """As part of a rule."""
    if form.json_object:
        return _json({"type": "object"})
    if form.json_schema is not None:
        return _json(_schema(form.json_schema))
    if form.regex is not None:
        return _regex(form.regex)
    if form.choice is not None:
        return _regex(regex_of(form.choice))
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


def _regex(regex: str) -> str:
    """Between slashes, in one line."""
    written = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return "/" + re.sub(r"\\?.", lambda found: written.get(found[0], found[0]), regex, flags=re.DOTALL) + "/"
