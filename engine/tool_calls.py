"""Tool calls, read back from the text that a model writes: one reader for each way of writing them.

A reader is fed text as it comes and gives back what of it is content and what are calls, however the text is cut. What
looks like a call and is none stays content: nothing is lost. It knows nothing of HTTP.
"""

import json
import re
from abc import ABC, abstractmethod
from typing import Any

import msgspec

from tercet.engine.found_json import is_text, parsed, value_at
from tercet.engine.gemma_calls import GEMMA_CLOSING, GEMMA_OPENING, gemma_call
from tercet.engine.marked_calls import Schemas, invoked_calls, marked_call
from tercet.engine.section_calls import DEEPSEEK, KIMI, section_calls
from tercet.ipc.answers import ToolFormat


class Call(msgspec.Struct, frozen=True):
    """A function, and its arguments as JSON."""

    name: str
    arguments: str
    id: str | None = None
    """As the model has written it; None: it writes none."""


Item = str | Call


class ToolReader(ABC):
    """Of one answer."""

    @abstractmethod
    def feed(self, text: str) -> list[Item]:
        """What has become clear with this text."""

    @abstractmethod
    def finish(self) -> list[Item]:
        """The rest, when no more text comes."""


def tool_reader(tool_format: ToolFormat, schemas: Schemas) -> ToolReader:
    """For a model that writes its calls so. `schemas`: of the tools that it has."""
    match tool_format:
        case "hermes" | "qwen3_coder" | "glm":
            return _HermesReader(schemas)
        case "minimax":
            return _MiniMaxReader(schemas)
        case "deepseek" | "deepseek_fenced":
            return _DeepSeekReader(schemas)
        case "kimi":
            return _KimiReader(schemas)
        case "gemma":
            return _GemmaReader(schemas)
        case "llama3":
            return _LlamaReader()
        case "mistral" | "mistral_named":
            return _MistralReader()
        case "harmony" | "none":  # harmony's calls are found where its messages are
            return _PlainReader()


def held_back(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


def read_call(name: str, arguments: str) -> Call | None:
    """None if the arguments are no JSON object that a client could read."""
    return _call(name, parsed(arguments))


class _PlainReader(ToolReader):
    """Everything is content."""

    def feed(self, text: str) -> list[Item]:
        return [text] if text else []

    def finish(self) -> list[Item]:
        return []


class _HermesReader(ToolReader):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them: Hermes, Qwen. Or with marks inside:
    Qwen3-Coder, GLM. Whichever it is meant to write, a model's other ways are read, too."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._rest = ""
        self._inside = False
        self._follows_call = False
        self._space = ""

    def feed(self, text: str) -> list[Item]:
        self._rest += text
        items: list[Item] = []
        while True:
            marker = self._CLOSE if self._inside else self._OPEN
            before, found, after = self._rest.partition(marker)
            if not found:
                break
            items += self._read_call(before, found) if self._inside else self._content(before)
            self._inside, self._rest = not self._inside, after
        if not self._inside and (clear := len(self._rest) - held_back(self._rest, self._OPEN)):
            items += self._content(self._rest[:clear])
            self._rest = self._rest[clear:]
        return items

    def finish(self) -> list[Item]:
        rest, self._rest = self._rest, ""
        return self._read_call(rest, "") if self._inside else self._content(rest)

    def _read_call(self, body: str, close: str) -> list[Item]:
        calls = self._calls(body)
        if not calls:
            return self._content(self._OPEN + body + close)
        self._follows_call, self._space = True, ""
        return [*calls]

    def _calls(self, body: str) -> list[Call]:
        """None if it is anything else."""
        call = _call_of(parsed(body))
        if call is None and (marked := marked_call(body, self._schemas)) is not None:
            call = _call(*marked)
        return [] if call is None else [call]

    def _content(self, text: str) -> list[Item]:
        """White space after a call is content only if more content follows."""
        text = self._space + text
        if self._follows_call and not text.strip():
            self._space = text
            return []
        self._follows_call, self._space = False, ""
        return [text] if text else []


class _MiniMaxReader(_HermesReader):
    """`<minimax:tool_call><invoke name="…"><parameter name="…">…</parameter></invoke></minimax:tool_call>`."""

    _OPEN, _CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"

    def _calls(self, body: str) -> list[Call]:
        calls = [_call(*marked) for marked in invoked_calls(body, self._schemas)]
        return [] if None in calls else [call for call in calls if call is not None]


class _DeepSeekReader(_HermesReader):
    """A section of calls, each a name and its arguments, which may stand in a fence: both ways of DeepSeek's models."""

    _SECTION = DEEPSEEK
    _OPEN, _CLOSE = DEEPSEEK.opening, DEEPSEEK.closing

    def _calls(self, body: str) -> list[Call]:
        calls = [_call(*found) for found in section_calls(body, self._SECTION)]
        return [] if None in calls else [call for call in calls if call is not None]


class _KimiReader(_DeepSeekReader):
    """A section of calls, each an id that has the name in it and its arguments: Kimi K2."""

    _SECTION = KIMI
    _OPEN, _CLOSE = KIMI.opening, KIMI.closing


class _GemmaReader(_HermesReader):
    """`<|tool_call>call:name{key:value}<tool_call|>`, any number of them: Gemma 4."""

    _OPEN, _CLOSE = GEMMA_OPENING, GEMMA_CLOSING

    def _calls(self, body: str) -> list[Call]:
        found = gemma_call(body)
        call = None if found is None else _call(*found)
        return [] if call is None else [call]


class _BufferedReader(ToolReader):
    """What follows the beginning of calls is calls to the end, and read there."""

    def __init__(self) -> None:
        self._rest = ""
        self._inside = False

    def feed(self, text: str) -> list[Item]:
        self._rest += text
        if self._inside:
            return []
        content, self._inside = self._split()
        self._rest = self._rest[len(content) :]
        return [content] if content else []

    def finish(self) -> list[Item]:
        rest, self._rest = self._rest, ""
        return [*(self._calls(rest) if self._inside else ())] or ([rest] if rest else [])

    @abstractmethod
    def _split(self) -> tuple[str, bool]:
        """What of the rest is surely content, and whether calls begin after it."""

    @abstractmethod
    def _calls(self, text: str) -> list[Call]:
        """All calls in `text`; none if it is anything else."""


class _LlamaReader(_BufferedReader):
    """`{"name": …, "parameters": {…}}`, perhaps after `<|python_tag|>`, several with `;` between: Llama 3."""

    _TAG = "<|python_tag|>"

    def __init__(self) -> None:
        super().__init__()
        self._is_content = False

    def _split(self) -> tuple[str, bool]:
        if not self._is_content:
            text = self._rest.lstrip()
            if text.startswith(("{", self._TAG)):
                return "", True
            if self._TAG.startswith(text):  # too early to say, or nothing at all
                return "", False
            self._is_content = True
        before, found, _ = self._rest.partition(self._TAG)
        if found:
            return before, True
        return self._rest[: len(self._rest) - held_back(self._rest, self._TAG)], False

    def _calls(self, text: str) -> list[Call]:
        return _calls_in_row(text.strip().removeprefix(self._TAG), ";")


class _MistralReader(_BufferedReader):
    """`[TOOL_CALLS]` and then a list of calls, or `name{…}` for each: Mistral."""

    _OPEN = "[TOOL_CALLS]"
    _HEAD = re.compile(r"\s*\[TOOL_CALLS\]\s*(?:([\w.-]{1,256})\s*(?:\[CALL_ID\][\w-]*)?\s*(?:\[ARGS\])?\s*(?=\{))?")

    def _split(self) -> tuple[str, bool]:
        before, found, _ = self._rest.partition(self._OPEN)
        if found:
            return before, True
        return self._rest[: len(self._rest) - held_back(self._rest, self._OPEN)], False

    def _calls(self, text: str) -> list[Call]:
        """Read value by value: what opens calls may stand in a string, too."""
        calls: list[Call] = []
        text = text.rstrip()
        at = 0
        while at < len(text):
            head = self._HEAD.match(text, at)
            if head is None:
                return []
            value, at = value_at(text, head.end())
            listed = value if isinstance(value, list) else []
            found = [_call(head[1], value)] if head[1] else [_call_of(one) for one in listed]
            if not found or None in found:
                return []
            calls += [call for call in found if call is not None]
        return calls


def _calls_in_row(text: str, separator: str) -> list[Call]:
    calls, at = [], 0
    while at < len(text):
        value, at = value_at(text, at)
        call = _call_of(value)
        if call is None:
            return []
        calls.append(call)
        while at < len(text) and (text[at].isspace() or text[at] == separator):
            at += 1
    return calls


def _call_of(value: Any) -> Call | None:
    if not isinstance(value, dict):
        return None
    return _call(value.get("name"), value.get("arguments", value.get("parameters")))


def _call(name: Any, arguments: Any, call_id: str | None = None) -> Call | None:
    """None if a client could not read it: there are numbers that Python takes for JSON, and nobody else does."""
    if not isinstance(name, str) or not is_text(name) or not isinstance(arguments, dict):
        return None
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return Call(name, written if is_text(written) else json.dumps(arguments), call_id)
    except (ValueError, RecursionError):
        return None
