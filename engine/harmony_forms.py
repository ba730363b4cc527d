"""Forms of answers in the harmony format, as grammars: which messages may come, and what is in them.

Pure; it knows the notation of grammars and no HTTP.
"""

import json
import re
from collections.abc import Sequence

from tercet.engine.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START
from tercet.engine.lark import Marks, in_lark, named
from tercet.engine.openai_messages import Tool
from tercet.engine.tool_schemas import of_arguments
from tercet.ipc.messages import Structured


def final_message(form: Structured, marks: Marks) -> Structured:
    """What `form` allows, as the answer. Raises `Refusal`."""
    return Structured(grammar=f"start: {_header('final', marks)} answer\nanswer: {in_lark(form)}\n")


def call_rules(tools: Sequence[Tool], marks: Marks) -> str:
    """The rule `calls`, and what it needs: a call of any of the tools, with arguments as it wants them.

    The recipient may stand on either side of the channel.
    """
    channel, message = named(CHANNEL, marks), named(MESSAGE, marks)
    rules = [f"calls: {' | '.join(f'head_{place} args_{place}' for place, _ in enumerate(tools))}"]
    for place, tool in enumerate(tools):
        to = f"to=functions.{tool.function.name}"
        behind, ahead = json.dumps(f"commentary {to}"), json.dumps(f" {to}")
        rules.append(f'head_{place}: ({channel} {behind} | {ahead} {channel} "commentary") kind? {message}')
        rules.append(f"args_{place}: %json {json.dumps(of_arguments(tool))}")
    return "\n".join([*rules, f'kind: " "? {named(CONSTRAIN, marks)} "json" | " json"', ""])


def any_messages(tools: Sequence[Tool], marks: Marks) -> Structured:
    """Any thoughts and texts, with a call behind them or without."""
    last = " | ".join(f"{_header(channel, marks)} text" for channel in ("analysis", "commentary", "final"))
    said = " | ".join(f"{_header(channel, marks)} whole" for channel in ("analysis", "commentary"))
    return Structured(
        grammar=f"start: (said next)* ({last} | calls)\nsaid: {said}\n"
        f"text: /(.|\\n)*/\n{_between(marks)}{call_rules(tools, marks)}"
    )


def after_analysis(form: Structured, marks: Marks, *, has_begun: bool) -> Structured:
    """Thoughts, if there are any, and then messages as `form` has them. `has_begun`: the prompt has, with the model's
    turn."""
    begin = "" if has_begun else f'{named(START, marks)} "assistant" '
    return Structured(
        grammar=f"start: {begin}(thought next)* answer\nthought: {_header('analysis', marks)} whole\n"
        f"{_between(marks)}answer: {in_lark(form)}\n"
    )


def _header(channel: str, marks: Marks) -> str:
    return f'{named(CHANNEL, marks)} "{channel}" {named(MESSAGE, marks)}'


def _between(marks: Marks) -> str:
    """The rules `whole`, any text and its end, and `next`, what stands ahead of another message."""
    following = f'next: {named(START, marks)} "assistant"\n'
    if END in marks:
        return f"whole: any {named(END, marks)}\nany: /(.|\\n)*/\n{following}"
    return f"whole[lazy]: /(.|\\n)*{re.escape(END)}/\n{following}"  # the first end is the end
