"""Answers that have a form from the end of the model's reasoning on, whether or not the prompt has opened that.

Pure; it knows the notation of grammars and no HTTP.
"""

from tercet.engine.lark import Marks, in_lark, named
from tercet.engine.reasoning import CLOSE, OPEN
from tercet.ipc.messages import Structured

_TO_SPELLED = "thought: text gap\ntext[lazy]: /(.|\\n)*<\\/think>/\n"  # lazy: the first end is the end
_GAP = "gap: /[ \\n]{0,4}/\n"
"""Models leave lines free there; as many as they like could be all that max_tokens has room for."""


def after_thought(form: Structured, marks: Marks, *, opened: bool) -> Structured:
    """Any text to the end of the reasoning, then what `form` allows. Raises `Refusal`.

    Unless the prompt has `opened` the reasoning, the answer may, or have its form at once.
    """
    start = "start: thought answer\n" if opened else f"start: answer | {named(OPEN, marks)} thought answer\n"
    to_token = f"thought: text {named(CLOSE, marks)} gap\ntext: /(.|\\n)*/\n"
    thought = to_token if CLOSE in marks else _TO_SPELLED
    return Structured(grammar=f"{start}{thought}{_GAP}answer: {in_lark(form)}\n")
