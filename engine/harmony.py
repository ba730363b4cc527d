"""Answers in the harmony format, which gpt-oss writes: messages, each of which says for whom it is.

A message is a header, `<|message|>`, a body and a mark for its end; `<|start|>` stands ahead of all but the first, that
which the prompt has begun. The header names the channel, and a recipient if somebody is called. What models get wrong
there is read as it is most likely meant; no body is lost. It knows nothing of HTTP.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from tercet.engine.lark import Marks
from tercet.engine.marked_text import Found, MarkedText
from tercet.engine.said import AnswerReader, Said, Span
from tercet.engine.tool_calls import read_call

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_ENDS = (END, CALL, RETURN)
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *_ENDS)
HEADERS = (f"{CHANNEL}analysis{MESSAGE}", f"{END}{START}assistant{CHANNEL}final{MESSAGE}")
"""What stands before and between the parts of nearly every answer."""
_FUNCTIONS = "functions."
_NOBODY = ("assistant", "all", "user")
"""Recipients that are no tools."""
_LONGEST_HEADER = 512
"""Characters. What is longer is a body whose header has no end."""
_PARTS = re.compile(
    r"\s*(?:assistant)?\s*(?:to=[^\s<]+)?\s*(?:<\|channel\|>\s*\w*)?\s*(?:to=[^\s<]+)?"
    r"\s*(?:<\|constrain\|>\s*\w*)?\s*"
)
"""What of a header without an end is surely one; the rest is a body."""
_RECIPIENT = re.compile(r"(?:\bto=|(?<!\S)(?=functions\.))([^\s<]+)")

_Kind = Literal["reasoning", "content", "call"]


class HarmonyReader(AnswerReader):
    """Calls of the client's functions are calls. What goes to other tools, and what the model has others say, is
    reasoning: nobody here can do anything with it. Channels that nobody knows are content."""

    def __init__(self, marks: Marks, tools: Collection[str], *, reads_calls: bool, goes_on: bool) -> None:
        """`tools`: names of those that the model has, which it may also call without a prefix. Unless it `reads_calls`
        they are content. `goes_on`: the prompt ends within a message that is content."""
        self._text = MarkedText(MARKS, marks)
        self._marks = {token_id: mark for mark, token_id in marks.items() if mark in MARKS}
        self._tools = tools
        self._reads_calls = reads_calls
        self._goes_on = goes_on
        self._header: list[Found] | None = None if goes_on else []
        """Of the message that begins; None: its body has begun."""
        self._kind: _Kind = "content"
        self._name = ""
        """Of the function that is called."""
        self._body: list[Found] = []
        """Of a call, which is read at its end."""
        self._is_fresh = True
        """Nothing of the message has been told."""
        self._told: set[_Kind] = set()
        """What there has been in the answer."""
        self._thoughts: list[bool] = []
        """Of each message with a header, whether it is reasoning."""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Said]:
        return [said for found in self._text.feed(text, token_ids) for said in self._read(found)]

    def finish(self) -> list[Said]:
        rest = [said for found in self._text.finish() for said in self._read(found)]
        return [*rest, *self._end(is_whole=self._text.is_due)]  # the token that ends the answer has no text

    def num_thought(self, token_ids: Sequence[int]) -> int | None:
        """With their headers and ends."""
        if MESSAGE not in self._marks.values():
            return None
        kinds = iter(self._thoughts)
        total = size = 0
        is_inside, thinks = self._goes_on, False
        for token_id in token_ids:
            mark = self._marks.get(token_id)
            if is_inside and mark in (START, CHANNEL):
                total, size, is_inside, thinks = total + thinks * size, 0, False, False
            size += 1
            if mark == MESSAGE and not is_inside:
                is_inside, thinks = True, next(kinds, False)
            elif mark in _ENDS:
                total, size, is_inside, thinks = total + thinks * size, 0, False, False
        return total + thinks * size

    def _read(self, found: Found) -> Iterator[Said]:
        mark = found.text if found.is_mark else None
        if mark in _ENDS:
            yield from self._end(is_whole=True)
        elif mark == START or (mark == CHANNEL and self._header is None):
            yield from self._end(is_whole=True)
            self._header = [found]
        elif self._header is None:
            if mark is None:  # other marks say nothing there
                yield from self._say(found)
        elif mark == MESSAGE:
            self._begin(self._header)
            self._thoughts.append(self._kind == "reasoning")
        elif mark is not None:
            self._header.append(found)
        else:
            room = _LONGEST_HEADER - sum(len(one.text) for one in self._header)
            self._header.append(Found(found.text[:room], found.place, is_mark=False))
            if len(found.text) > room:
                yield from self._begin_without(self._header)
                yield from self._say(Found(found.text[room:], found.place + room, is_mark=False))

    def _begin(self, header: Sequence[Found]) -> None:
        self._header, self._is_fresh = None, True
        self._kind, self._name = self._meant(header)

    def _begin_without(self, header: Sequence[Found]) -> Iterator[Said]:
        """A message whose header has no end: what of it is none is the body."""
        self._begin(header)
        start = header[0].place + (len(START) if header[0].text == START else 0)
        text = "".join(found.text for found in header).removeprefix(START)
        has_marks = any(found.is_mark for found in header)
        parts = _PARTS.match(text) if has_marks or text.lstrip().startswith("to=") else None
        length = 0 if parts is None else parts.end()
        if text[length:].strip():
            yield from self._say(Found(text[length:], start + length, is_mark=False))

    def _meant(self, header: Sequence[Found]) -> tuple[_Kind, str]:
        """What the message is, and the name of the function that it calls."""
        texts, section = {START: "", CHANNEL: "", CONSTRAIN: ""}, START
        for found in header:
            section = found.text if found.is_mark else section
            texts[section] = "" if found.is_mark else texts[section] + found.text
        words = texts[START].split()
        role = words.pop(0) if header and header[0].text == START and words and "to=" not in words[0] else "assistant"
        if not role.startswith("assistant"):
            return "reasoning", ""
        recipient = _RECIPIENT.search(" ".join([*words, texts[CHANNEL], texts[CONSTRAIN]]))
        to = recipient[1] if recipient and recipient[1] not in _NOBODY else ""
        if name := to.removeprefix(_FUNCTIONS) if to.startswith(_FUNCTIONS) or to in self._tools else "":
            return "call" if self._reads_calls else "content", name
        is_thought = to or texts[CHANNEL].lstrip().startswith("analysis")
        return "reasoning" if is_thought else "content", ""

    def _say(self, found: Found) -> Iterator[Said]:
        if self._kind == "call":
            self._body.append(found)
            return
        begin, end = found.place, found.place + len(found.text)
        if self._is_fresh and self._kind in self._told:
            yield _said(self._kind, "\n", (begin, begin))
        self._is_fresh = False
        self._told.add(self._kind)
        yield _said(self._kind, found.text, (begin, end))

    def _end(self, *, is_whole: bool) -> Iterator[Said]:
        """Of the message. A call without arguments may also be one that is not `is_whole`."""
        if self._header:
            yield from self._begin_without(self._header)
            is_whole = False
        if self._kind == "call":
            body, self._body = self._body, []
            call = read_call(self._name, "".join(found.text for found in body) or ("{}" if is_whole else ""))
            if call is not None:
                yield Said(call=call)
            else:
                self._kind = "content"
                for found in body:
                    yield from self._say(found)
        self._header, self._kind = [], "content"


def _said(kind: _Kind, text: str, span: Span) -> Said:
    return Said(reasoning=text, span=span) if kind == "reasoning" else Said(content=text, span=span)
