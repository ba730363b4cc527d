"""Conversations to prompts, by the template that comes with the checkpoint, or a file of the operator's.

The template is a program in a foreign file: it runs in Jinja's immutable sandbox and sees the messages, the special
tokens and nothing else. Templates never come from requests.
"""

import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from tercet.engine.errors import UnsupportedModel
from tercet.engine.gemma_calls import GEMMA_OPENING
from tercet.engine.harmony import CHANNEL, MESSAGE
from tercet.engine.harmony_turns import EFFORTS, described, harmony_turns
from tercet.engine.reasoning import THINK, special_format
from tercet.engine.refusal import short
from tercet.engine.section_calls import DEEPSEEK, KIMI
from tercet.engine.template_content import shown, with_mark
from tercet.ipc.answers import ReasoningFormat, ToolFormat
from tercet.ipc.messages import ChatMessage, ChatOptions, FunctionCall, ToolCall

TEMPLATE_KWARGS = ("enable_thinking", "thinking", "reasoning_effort")
"""What a request may tell the template; any other name could replace what the template relies on."""
_THINKS = TEMPLATE_KWARGS[:2]
_NO_OPTIONS = ChatOptions()
_SHOWN_ARGUMENTS = {"x": "y"}
_MARK = "\uf8ff"
"""Of no script: a turn's text is cut where it stands."""


class TemplateRefused(ValueError):
    """The template cannot make a prompt of this conversation; the message is what it said."""


class _CallWish(NamedTuple):
    """How a template wants a turn with calls."""

    as_json: bool = False
    """The arguments, which it joins to other text as they are; else an object."""
    content: str | None = None
    """What is said besides, where nothing is."""


class ChatTemplate:
    """One checkpoint's template, or two: some have one of their own for conversations with tools."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        tool_use: str | None = None,
        what: str = "the checkpoint's chat template",
    ) -> None:
        """`special_tokens`: such as `bos_token`, for the template to name. `tool_use`: the source where tools come.
        `what`: whose it is, to say of one that cannot be used."""
        self._template = compiled(source, what)
        self._tool_use = self._template if tool_use is None else compiled(tool_use, what)
        self._special_tokens = special_tokens
        with_tools = source if tool_use is None else tool_use
        self._takes_tools = "tools" in with_tools
        self._is_harmony = CHANNEL in source and MESSAGE in source
        self._wish = _CallWish()
        if "tool_calls" in with_tools:
            self._wish = self._find_wish()
        self.tool_format = self._find_tool_format(with_tools)
        self.reasoning_format = self._find_reasoning_format(source)

    def render(self, messages: Sequence[ChatMessage], options: ChatOptions = _NO_OPTIONS) -> str:
        """The prompt for the assistant's next turn, or as `options.ending` says."""
        template_kwargs = _heard(options.template_kwargs)
        turns = [_as_dict(message, self._wish) for message in messages]
        tools = [dict(tool) for tool in options.tools]
        if self._is_harmony:
            turns, tools = harmony_turns(turns), [*described(tools)]
            template_kwargs = _with_effort(template_kwargs)
        end = _mark_end(turns) if options.ending == "continued" else None
        if options.tools and not self._takes_tools:
            raise TemplateRefused(f"tools has {len(options.tools)}; want none: the chat template does not show them")
        template = self._tool_use if options.tools else self._template
        prompt = rendered(
            template,
            "the chat template",
            messages=turns,
            add_generation_prompt=options.ending == "reply",
            tools=tools or None,
            documents=None,
            **self._special_tokens,
            **template_kwargs,
        )
        if self._is_harmony:
            _check_shown(turns, prompt)
        return prompt if end is None else _cut(prompt, end)

    def _find_tool_format(self, source: str) -> ToolFormat:
        """Templates say how calls of earlier turns are written: so will the model write its own."""
        if self._is_harmony:
            return "harmony"
        if "<tool_call>" in source:
            return "qwen3_coder" if "<function=" in source else "glm" if "<arg_key>" in source else "hermes"
        if "<minimax:tool_call>" in source:
            return "minimax"
        if "[TOOL_CALLS]" in source:
            return "mistral_named" if re.search(r"\[TOOL_CALLS\]\s*f\b", self._shown_call() or "") else "mistral"
        if DEEPSEEK.opening in source:
            return "deepseek_fenced" if "```json" in source else "deepseek"
        if KIMI.opening in source:
            return "kimi"
        if GEMMA_OPENING in source:
            return "gemma"
        if "<|python_tag|>" in source or "Environment: ipython" in source:
            return "llama3"
        return "none"

    def _find_wish(self) -> _CallWish:
        """The first with which it neither refuses a call nor shows Python's notation of its arguments."""
        for content in (None, ""):
            for as_json in (False, True):
                self._wish = _CallWish(as_json, content)
                shown = self._shown_call()
                if shown is not None and str(_SHOWN_ARGUMENTS) not in shown:
                    return self._wish
        return _CallWish()

    def _shown_call(self) -> str | None:
        """A prompt with a call of `f`; None: the template refuses it."""
        function = {"name": "f", "description": "x", "parameters": {"type": "object", "properties": {}}}
        tools = ({"type": "function", "function": function},) if self._takes_tools else ()
        call = ToolCall(id="000000000", function=FunctionCall("f", _SHOWN_ARGUMENTS))  # nine of them, as some want
        turns = [
            ChatMessage("user", "x"),
            ChatMessage("assistant", tool_calls=(call,)),
            ChatMessage("tool", "x", tool_call_id=call.id),
        ]
        try:
            return self.render(turns, ChatOptions(tools=tools))
        except TemplateRefused:
            return None

    def _find_reasoning_format(self, source: str) -> ReasoningFormat:
        if self._is_harmony:
            return "harmony"
        if THINK.closing not in source:
            return special_format(source)
        if not self._opens_thought({"thinking": True}):
            return "think"
        if not self._opens_thought({}):
            return "think_on_request"
        return "think_opened" if self._opens_thought({"thinking": False}) else "think_by_default"

    def _opens_thought(self, template_kwargs: dict[str, bool | int | str]) -> bool:
        try:
            prompt = self.render([ChatMessage("user", "x")], ChatOptions(template_kwargs=template_kwargs))
        except TemplateRefused:
            return False
        return prompt.rstrip().endswith("<think>")


def read_template(file: str, flag: str) -> str:
    """What is in a file of the operator's. Raises `UnsupportedModel`, of `flag`."""
    try:
        return Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnsupportedModel(f"{flag}: {file} cannot be read: {error}") from None


def compiled(source: str, what: str) -> jinja2.Template:
    """A template in the sandbox. Raises `UnsupportedModel`, of `what`."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
        raise UnsupportedModel(f"{what} cannot be used: {error}") from None


def rendered(template: jinja2.Template, what: str, **values: Any) -> str:
    """What it writes of these. Raises `TemplateRefused`, of `what`."""
    try:
        return template.render(**values)
    except jinja2.TemplateError as error:
        raise TemplateRefused(f"{what} refused the messages: {error}") from None
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        # A template is a program: what it stumbles over is about these messages, not about the engine.
        raise TemplateRefused(f"{what} failed on the messages: {error}") from None


def _heard(template_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What the template is told: of the two names for thinking it knows one, whichever came."""
    for name in template_kwargs:
        if name not in TEMPLATE_KWARGS:
            raise TemplateRefused(f"chat_template_kwargs has {name[:50]!r}; want {', '.join(TEMPLATE_KWARGS)}")
    told = [template_kwargs[name] for name in _THINKS if name in template_kwargs]
    if not told:
        return template_kwargs
    if any(one is not told[0] or not isinstance(one, bool) for one in told):
        names = " and ".join(name for name in _THINKS if name in template_kwargs)
        raise TemplateRefused(f"chat_template_kwargs has {short(told)} for {names}; want true or false under one name")
    return {**template_kwargs, **dict.fromkeys(_THINKS, told[0])}


def _with_effort(template_kwargs: dict[str, Any]) -> dict[str, Any]:
    """As the model has learned it."""
    if "reasoning_effort" not in template_kwargs:
        return template_kwargs
    effort = template_kwargs["reasoning_effort"]
    if effort not in EFFORTS:
        raise TemplateRefused(f"reasoning_effort is {short(effort)}; want low, medium or high, with this model")
    return {**template_kwargs, "reasoning_effort": EFFORTS[effort]}


def _check_shown(turns: Sequence[dict[str, Any]], prompt: str) -> None:
    """Templates of the harmony format pass over the system's later turns."""
    for turn in turns[1:]:
        if turn["role"] == "system" and turn["content"].strip() not in prompt:
            raise TemplateRefused(
                "messages has a turn of the system behind others, which the chat template does not show; want it first"
            )


def _as_dict(message: ChatMessage, wish: _CallWish) -> dict[str, Any]:
    """As templates know messages: what is not there has no key."""
    turn: dict[str, Any] = {"role": message.role, "content": shown(message.content)}
    if message.tool_calls:
        if message.content is None:
            turn["content"] = wish.content
        turn["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {
                    "name": call.function.name,
                    "arguments": _to_json(call.function.arguments) if wish.as_json else call.function.arguments,
                },
            }
            for call in message.tool_calls
        ]
    for field in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, field)) is not None:
            turn[field] = value
    return turn


def _mark_end(turns: Sequence[dict[str, Any]]) -> str:
    """Write behind the last turn's text what nobody has written, and return it."""
    last = turns[-1]
    if last["role"] != "assistant" or last["content"] is None or "tool_calls" in last:
        what = "calls" if "tool_calls" in last else f"a turn of the {last['role']}"
        raise TemplateRefused(f"messages ends with {what}; want the assistant's text, which is to go on")
    mark = _MARK
    while any(mark in str(turn) for turn in turns):
        mark += _MARK
    if (content := with_mark(last["content"], mark)) is None:
        raise TemplateRefused("messages ends with an image; want the assistant's text, which is to go on")
    last["content"] = content
    return mark


def _cut(prompt: str, end: str) -> str:
    if end not in prompt:
        raise TemplateRefused("the chat template does not show the last turn's text, which is to go on")
    return prompt[: prompt.rindex(end)]


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` marks what a trainer learns from; for a prompt its inside is plain text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers' own. Jinja's escapes for HTML, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
