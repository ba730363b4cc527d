"""Tool calls in a section of their own, JSON between marks for each: as DeepSeek's models and Kimi K2 write them.

Pure; it knows whole sections and no streams.
"""

import re
from typing import Any, NamedTuple

from tercet.engine.found_json import value_at


class Section(NamedTuple):
    """Its marks, which may be tokens."""

    opening: str
    call: str
    separator: str
    """Ahead of the arguments; in the older way of DeepSeek's models ahead of the name."""
    call_end: str
    closing: str


class SectionCall(NamedTuple):
    """One call."""

    name: str
    arguments: Any
    """What they are as JSON."""
    call_id: str | None
    """As the model writes it, if it does."""


DEEPSEEK = Section(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
KIMI = Section(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
_NAME = r"(?P<name>[\w.-]{1,256})"
_HEADS = {
    # Both ways: `function`, the name, and the arguments in a fence; or the name, and the arguments.
    DEEPSEEK: re.compile(
        rf"{DEEPSEEK.call}\s*(?:function{DEEPSEEK.separator}\s*{_NAME}\s*(?:```(?:json)?\s*)?"
        rf"|{_NAME.replace('name', 'plain_name')}\s*{DEEPSEEK.separator}\s*)(?=\{{)"
    ),
    KIMI: re.compile(
        rf"{re.escape(KIMI.call)}\s*(?P<id>(?:functions\.)?{_NAME}:\d+)\s*{re.escape(KIMI.separator)}\s*(?=\{{)"
    ),
}
_TAILS = {
    DEEPSEEK: re.compile(rf"\s*(?:```\s*)?{DEEPSEEK.call_end}\s*"),
    KIMI: re.compile(rf"\s*{re.escape(KIMI.call_end)}\s*"),
}


def section_calls(body: str, section: Section) -> list[SectionCall]:
    """What stands between a section's opening and its closing; none if it is anything else than calls."""
    calls, text, at = [], body.strip(), 0
    while at < len(text):
        head = _HEADS[section].match(text, at)
        if head is None:
            return []
        # Read as a value: what ends calls may stand in a string, too.
        arguments, at = value_at(text, head.end())
        tail = _TAILS[section].match(text, at)
        if tail is None:
            return []
        found = head.groupdict()
        calls.append(SectionCall(found["name"] or found["plain_name"], arguments, found.get("id")))
        at = tail.end()
    return calls
