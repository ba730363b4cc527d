"""Calls in a section of their own as rules of a grammar: those that `section_calls.py` reads.

Pure; it knows the notation of grammars and no HTTP.
"""

import json
import re
from collections.abc import Sequence

from tercet.engine.lark import Marks, in_slashes, named
from tercet.engine.openai_messages import Tool
from tercet.engine.section_calls import DEEPSEEK, KIMI
from tercet.engine.tool_schemas import of_arguments
from tercet.ipc.answers import ToolFormat


def section_rules(tools: Sequence[Tool], tool_format: ToolFormat, marks: Marks, *, several: bool) -> str:
    """The rule `calls`, and what it needs: a call of any of the tools, from after the section's opening on."""
    section, is_fenced = KIMI if tool_format == "kimi" else DEEPSEEK, tool_format == "deepseek_fenced"
    between, behind = (r'"\n" ', r'"\n```" ') if is_fenced else ("", "")
    more = f" ({between}call)*" if several else ""
    ways = [f"{_head(tool.function.name, tool_format, marks)} args_{place}" for place, tool in enumerate(tools)]
    schemas = [f"args_{place}: %json {json.dumps(of_arguments(tool))}\n" for place, tool in enumerate(tools)]
    return (
        f"calls: call{more} {named(section.closing, marks)}\n"
        f"call: {named(section.call, marks)} ({' | '.join(ways)}) {behind}{named(section.call_end, marks)}\n"
        f"{''.join(schemas)}"
    )


def _head(name: str, tool_format: ToolFormat, marks: Marks) -> str:
    """What stands ahead of the arguments."""
    if tool_format == "kimi":
        numbered = in_slashes(re.escape(f"functions.{name}:") + "[0-9]{1,4}")
        return f"{numbered} {named(KIMI.separator, marks)}"
    separator = named(DEEPSEEK.separator, marks)
    if tool_format == "deepseek_fenced":
        opened = json.dumps(f"{name}\n```json\n")
        return f'"function" {separator} {opened}'
    return f"{json.dumps(name)} {separator}"
