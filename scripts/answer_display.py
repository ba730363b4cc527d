"""How an answer looks as it comes: its text as it is, the model's thoughts apart from that.

It knows what is said of an answer, and writes nowhere.
"""

from tercet.engine.openai_answers import ChatDelta

_DIM, _NOT_DIM = "\x1b[2m", "\x1b[22m"


class AnswerDisplay:
    """Of one answer. Thoughts are dim where there are `colours`, elsewhere under a heading."""

    def __init__(self, *, colours: bool) -> None:
        self._colours = colours
        self._thought, self._answer = (_DIM, _NOT_DIM) if colours else ("[thought]\n", "[answer]\n")
        self._has_thought = False
        self._is_thought = False
        self._ends_line = True

    def show(self, delta: ChatDelta) -> str:
        """What to write for it."""
        text, is_thought = delta.reasoning_content or delta.content or "", bool(delta.reasoning_content)
        if not text:
            return ""
        change = ""
        if is_thought != self._is_thought:
            change = ("" if self._ends_line else "\n") + (self._thought if is_thought else self._answer)
        self._has_thought |= is_thought
        self._is_thought, self._ends_line = is_thought, text.endswith("\n")
        return change + text

    def end(self) -> str:
        """Behind the last, also if that was cut off on its way to the screen."""
        return _NOT_DIM if self._colours and self._has_thought else ""
