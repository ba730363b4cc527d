"""Answers that have a form from the end of the model's reasoning on, whether or not the prompt has opened that.

Pure; it knows the notation of grammars and no HTTP.
"""

import json
import re

from tercet.engine.lark import Marks, in_lark, in_slashes, named
from tercet.engine.reasoning import THINK, Tags
from tercet.ipc.messages import Structured

_GAP = "gap: /[ \\n]{0,4}/\n"
"""Models leave lines free there; as many as they like could be all that max_tokens has room for."""


def after_thought(form: Structured, marks: Marks, *, opened: bool, tags: Tags = THINK) -> Structured:
    """Any text to the end of the reasoning, then what `form` allows. Raises `Refusal`.

    Unless the prompt has `opened` the reasoning, the answer may, or have its form at once.
    """
    name = f" {json.dumps(tags.name)}" if tags.name else ""
    opening = f"{named(tags.opening, marks)}{name}"
    start = "start: thought answer\n" if opened else f"start: answer | {opening} thought answer\n"
    if tags.closing in marks:
        thought = f"thought: text {named(tags.closing, marks)} gap\ntext: /(.|\\n)*/\n"
    else:  # lazy: the first end is the end
        to_the_end = in_slashes(r"(.|\n)*" + re.escape(tags.closing))
        thought = f"thought: text gap\ntext[lazy]: {to_the_end}\n"
    return Structured(grammar=f"{start}{thought}{_GAP}answer: {in_lark(form)}\n")
