"""Tool calls and reasoning read back from text, whole and cut at every place."""

import json
import random
from typing import Any

import pytest

from section_style import as_fenced, as_kimi, as_plain
from tercet.engine.reasoning import BRACKETS, CHANNEL, THINK, ReasoningReader, Tags, Thought
from tercet.engine.tool_calls import Call, Item, tool_reader
from tercet.ipc.answers import ToolFormat

TIME = Call("get_time", '{"zone": "Europe/Zürich"}')
SUM = Call("add", '{"a": 1, "b": [2, {"c": "}</tool"}]}')

MARK = Call("f", '{"x": "[TOOL_CALLS][{[ARGS]"}')


def as_json(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call.name, key: json.loads(call.arguments)})


HERMES = [f"<tool_call>\n{as_json(call)}\n</tool_call>" for call in (TIME, SUM)]
CASES: list[tuple[ToolFormat, str, list[Item]]] = [
    ("hermes", "Let me see. <tool <b", ["Let me see. <tool <b"]),
    ("hermes", HERMES[0], [TIME]),
    ("hermes", f"Let me see.\n{HERMES[0]}\n{HERMES[1]}\n", ["Let me see.\n", TIME, SUM]),
    ("hermes", f"{HERMES[0]} and {HERMES[1]} done", [TIME, " and ", SUM, " done"]),
    ("hermes", HERMES[0].removesuffix("</tool_call>"), [TIME]),
    ("hermes", "a<tool_call>{nonsense}</tool_call>b", ["a<tool_call>{nonsense}</tool_call>b"]),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', ['<tool_call>{"name": 3}</tool_call>']),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ['<tool_call>{"name": "f"}</tool_call>']),
    ("hermes", f"{HERMES[0]} <tool_call>x", [TIME, " <tool_call>x"]),
    ("hermes", '<tool_call>{"name": "f", "argum', ['<tool_call>{"name": "f", "argum']),
    ("llama3", as_json(TIME, "parameters"), [TIME]),
    ("llama3", f" <|python_tag|>{as_json(TIME)}; {as_json(SUM, 'parameters')}", [TIME, SUM]),
    ("llama3", f"I call <|python_tag|>{as_json(TIME)}", ["I call ", TIME]),
    ("llama3", 'It is {"name": "x"}, <|python', ['It is {"name": "x"}, <|python']),
    ("llama3", '{"answer": 42}', ['{"answer": 42}']),
    ("llama3", '{"name": "f", "parameters": {}} and so on', ['{"name": "f", "parameters": {}} and so on']),
    ("mistral", f"[TOOL_CALLS][{as_json(TIME)}, {as_json(SUM)}]", [TIME, SUM]),
    ("mistral", f"Wait [TOOL [TOOL_CALLS] [{as_json(TIME)}]", ["Wait [TOOL ", TIME]),
    ("mistral", f"[TOOL_CALLS]get_time{TIME.arguments}[TOOL_CALLS]add[ARGS]{SUM.arguments}", [TIME, SUM]),
    ("mistral", "[TOOL_CALLS]get_time[CALL_ID]a1b2[ARGS]" + TIME.arguments, [TIME]),
    ("mistral", f"[TOOL_CALLS][{as_json(MARK)[:-1]}, \"id\": \"abc123xyz\"}}]", [MARK]),
    ("mistral", f"[TOOL_CALLS]f{MARK.arguments} [TOOL_CALLS]add{SUM.arguments}\n", [MARK, SUM]),
    ("mistral", f"[TOOL_CALLS]f{MARK.arguments} x", [f"[TOOL_CALLS]f{MARK.arguments} x"]),
    ("mistral", f"[TOOL_CALLS][{as_json(TIME)}", [f"[TOOL_CALLS][{as_json(TIME)}"]),
    ("mistral", f"[TOOL_CALLS]{as_json(TIME)}", [f"[TOOL_CALLS]{as_json(TIME)}"]),
    ("mistral", "[TOOL_CALLS][{}]", ["[TOOL_CALLS][{}]"]),
    ("mistral", "[TOOL_CALLS]", ["[TOOL_CALLS]"]),
    ("none", HERMES[0], [HERMES[0]]),
    ("llama3", r'{"name": "f", "parameters": {"é": "\ud83d"}}', [Call("f", r'{"\u00e9": "\ud83d"}')]),
    ("llama3", r'{"name": "f", "parameters": {"é": "\ud83d\ude00"}}', [Call("f", '{"é": "😀"}')]),
    ("mistral", '[TOOL_CALLS]f{"x": NaN}', ['[TOOL_CALLS]f{"x": NaN}']),
]  # fmt: skip
UNREADABLE = [
    r'{"name": "\ud800", "arguments": {}}',
    *(f'{{"name": "f", "arguments": {{"x": [{number}]}}}}' for number in ("NaN", "-Infinity", "1e999")),
]
for _call in UNREADABLE:
    _written: dict[ToolFormat, str] = {"hermes": f"<tool_call>{_call}</tool_call>", "llama3": _call}
    CASES += [(tool_format, text, [text]) for tool_format, text in _written.items()]


SCHEMAS: dict[str, dict[str, Any]] = {
    "get_time": {"zone": {"type": "string"}},
    "add": {
        "a": {"type": "integer"},
        "b": {"anyOf": [{"type": "array"}, {"type": "null"}]},
        "c": {"enum": [1, 2.5]},
        "d": {"type": ["string", "null"]},
        "e": {"$ref": "#/$defs/Point"},
        "f": {"type": "boolean"},
    },
}
ALL = Call("add", '{"a": -3, "b": [1, "x"], "c": 2.5, "d": null, "e": {"x": 1}, "f": true, "g": "7"}')
GIVEN = {"a": "-3", "b": '[1, "x"]', "c": " 2.5", "d": "null", "e": '{"x": 1}', "f": "True", "g": "7"}
CODE = "if x < 3:\n    print('<parameter=a></parameter>')\n"
WRITE = Call("write", json.dumps({"path": "a.py", "text": CODE}))


def as_qwen(name: str, given: dict[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def as_glm(name: str, given: dict[str, str]) -> str:
    inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in given.items())
    return f"<tool_call>{name}\n{inner}</tool_call>"


def as_new_glm(name: str, given: dict[str, str]) -> str:
    """From 4.7 on."""
    return as_glm(name, given).replace("</arg_value>\n", "</arg_value>").replace(">\n<", "><").replace("\n<", "<", 1)


def as_minimax(*calls: tuple[str, dict[str, str]]) -> str:
    each = [
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in given.items())
        + "</invoke>\n"
        for name, given in calls
    ]
    return f"<minimax:tool_call>\n{''.join(each)}</minimax:tool_call>"


ZONE = {"zone": "Europe/Zürich"}
BARE = Call("get_time", "{}")
CASES += [
    ("hermes", f"So:\n{as_qwen('get_time', ZONE)}\n{as_qwen('add', GIVEN)}", ["So:\n", TIME, ALL]),
    ("hermes", as_qwen("write", {"path": "a.py", "text": CODE}), [WRITE]),
    ("hermes", as_qwen("get_time", {}), [BARE]),
    ("hermes", "<tool_call><function=get_time></function></tool_call>", [BARE]),
    ("hermes", f"{as_glm('get_time', ZONE)}{as_glm('add', GIVEN)}.", [TIME, ALL, "."]),
    ("glm", f"{as_new_glm('get_time', ZONE)}{as_new_glm('add', GIVEN)}.", [TIME, ALL, "."]),
    ("glm", as_new_glm("get_time", {}), [BARE]),
    ("hermes", as_glm("write", {"path": "a.py", "text": CODE}), [as_glm("write", {"path": "a.py", "text": CODE})]),
    ("hermes", "<tool_call>get_time</tool_call>", [BARE]),
    ("minimax", f"So:{as_minimax(('get_time', ZONE), ('add', GIVEN))}", ["So:", TIME, ALL]),
    ("minimax", as_minimax(("get_time", {})), [BARE]),
    ("minimax", HERMES[0], [HERMES[0]]),
]
for _text in (
    "<tool_call>later</tool_call>",
    "<tool_call><function=get_time>x</function></tool_call>",
    "<tool_call><function=get_time><parameter=zone>a</function></tool_call>",
    "<tool_call><function=></function></tool_call>",
    "<tool_call>get_time<arg_key>zone</arg_key></tool_call>",
    "<tool_call></tool_call>",
):
    CASES.append(("hermes", _text, [_text]))
for _text in (
    "<minimax:tool_call></minimax:tool_call>",
    '<minimax:tool_call><invoke name="f">x</invoke></minimax:tool_call>',
    '<minimax:tool_call><invoke name="f"></minimax:tool_call>',
    '<minimax:tool_call><invoke name="f"></invoke> and</minimax:tool_call>',
    "<minimax:tool_call><invoke name=f></invoke></minimax:tool_call>",
):
    CASES.append(("minimax", _text, [_text]))


GIVEN_TIME, GIVEN_SUM = ((call.name, call.arguments) for call in (TIME, SUM))
DOTTED = ("get.time-1", '{"a": "```<｜tool▁call▁end｜><|tool_call_end|>"}')
KIMI_CALLS = [Call(name, text, f"functions.{name}:{i}") for i, (name, text) in enumerate([GIVEN_TIME, GIVEN_SUM])]
KIMI_DOTTED = Call(*DOTTED, "functions.get.time-1:12")
for _written_as in (as_fenced, as_plain):
    _both = _written_as(GIVEN_TIME, GIVEN_SUM)
    _unended = _both.removesuffix("<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
    CASES += [
        ("deepseek", f"So: {_both}\n", ["So: ", TIME, SUM]),
        ("deepseek_fenced", f"{_both} and {_written_as(DOTTED)}", [TIME, SUM, " and ", Call(*DOTTED)]),
        ("deepseek", _both.removesuffix("<｜tool▁calls▁end｜>"), [TIME, SUM]),
        ("deepseek", _unended, [_unended]),
    ]
CASES += [
    ("deepseek", as_fenced(GIVEN_TIME).replace("```json", "").replace("```", ""), [TIME]),
    ("deepseek", as_plain(("function", "{}")), [Call("function", "{}")]),
    ("kimi", as_kimi(GIVEN_TIME, GIVEN_SUM), [*KIMI_CALLS]),
    ("kimi", f"So: {as_kimi(GIVEN_TIME)} {as_kimi(DOTTED, first=12)}", ["So: ", KIMI_CALLS[0], KIMI_DOTTED]),
    ("kimi", as_kimi(GIVEN_TIME).replace("functions.", ""), [Call(*GIVEN_TIME, "get_time:0")]),
    ("kimi", as_kimi(GIVEN_TIME).removesuffix("<|tool_calls_section_end|>"), [KIMI_CALLS[0]]),
    ("kimi", "<|tool_calls_sect", ["<|tool_calls_sect"]),
]  # fmt: skip
for _text in (
    *(write(("f", arguments)) for write in (as_fenced, as_plain) for arguments in ("[]", "{}{}", '{"x": NaN}', "x")),
    as_plain(),
    as_plain(("", "{}")),
    as_plain(GIVEN_TIME).replace("<｜tool▁call▁begin｜>", ""),
    as_plain(GIVEN_TIME).replace("<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>x"),
):
    CASES.append(("deepseek", _text, [_text]))
for _text in (
    *(as_kimi(("f", arguments)) for arguments in ("[]", "{}{}", '{"x": NaN}', "x")),
    as_kimi(),
    as_kimi(GIVEN_TIME).replace(":0", ""),
    as_kimi(GIVEN_TIME).replace("<|tool_call_end|>", ""),
    as_kimi(GIVEN_TIME, GIVEN_SUM).replace("1, ", "1; "),
):
    CASES.append(("kimi", _text, [_text]))


def joined(items: list[Item]) -> list[Item]:
    """Neighbouring texts as one."""
    out: list[Item] = []
    for item in items:
        if isinstance(item, str) and out and isinstance(out[-1], str):
            out[-1] += item
        else:
            out.append(item)
    return out


def cuts(text: str) -> list[list[str]]:
    """The whole, one character at a time, every cut in two, and some in many."""
    rng = random.Random(len(text))
    some = []
    for _ in range(20):
        places = sorted(rng.sample(range(len(text) + 1), min(5, len(text))))
        some.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    return [[text], list(text), *([text[:i], text[i:]] for i in range(len(text))), *some]


@pytest.mark.parametrize(("tool_format", "text", "wanted"), CASES)
def test_calls_however_the_text_is_cut(tool_format: ToolFormat, text: str, wanted: list[Item]) -> None:
    for pieces in cuts(text):
        reader = tool_reader(tool_format, SCHEMAS)
        items: list[Item] = []
        for piece in pieces:
            items += reader.feed(piece)
        assert joined([*items, *reader.finish()]) == wanted, pieces
        assert "" not in items


def test_content_does_not_wait_for_what_cannot_be_a_call() -> None:
    for tool_format in ("hermes", "mistral", "llama3"):
        reader = tool_reader(tool_format, SCHEMAS)  # type: ignore[arg-type]
        assert reader.feed("Hello ") == ["Hello "]
        assert reader.feed("you") == ["you"]


@pytest.mark.parametrize(
    ("opened", "text", "wanted"),
    [
        (False, "<think>\nHm, <b> </thin.\n</think>\n\nYes. </think>", Thought("Hm, <b> </thin.\n", "Yes. </think>")),
        (False, " \n<think></think>Yes", Thought("", "Yes")),
        (False, "Yes <think>no</think>", Thought("", "Yes <think>no</think>")),
        (False, "<thinks>", Thought("", "<thinks>")),
        (False, "<think>never ends </thi", Thought("never ends </thi", "")),
        (False, "<thi", Thought("", "<thi")),
        (True, "\nHm.</think>\nYes", Thought("Hm.", "Yes")),
        (True, "Hm.", Thought("Hm.", "")),
        (False, "", Thought("", "")),
    ],
)
@pytest.mark.parametrize("tags", [THINK, BRACKETS, CHANNEL])
def test_reasoning_however_the_text_is_cut(opened: bool, text: str, wanted: Thought, tags: Tags) -> None:
    for mark, other in ((THINK.opening, tags.opening + tags.name), (THINK.closing, tags.closing)):
        text = text.replace(mark, other)
        wanted = Thought(*(part.replace(mark, other) for part in wanted))
    for pieces in cuts(text) if text else [[""]]:
        reader = ReasoningReader(opened, tags=tags)
        thoughts = [*map(reader.feed, pieces), reader.finish()]
        got = Thought("".join(one.reasoning for one in thoughts), "".join(one.content for one in thoughts))
        assert got == wanted, pieces
