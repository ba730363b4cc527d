"""Forms of answers in the harmony format: what the library that computes masks makes of them, and a whole engine.

Its weights are random: the mask alone has it write messages, calls and what they are held to.
"""

import copy
import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI
from tokenizers import AddedToken

from at_once import at_once
from checkpoints import checkpoint, tokenizer
from covering import long
from daemon import Daemon, free_port
from families import VOCAB_SIZE
from grammar_fits import fits, ids_of
from harmony_style import TEMPLATE
from tercet.engine.harmony import MARKS
from tercet.engine.harmony_forms import after_analysis, final_message
from tercet.engine.openai_messages import Function, Tool
from tercet.engine.tool_choice import call_or, forced_call, strict_calls
from tercet.ipc.messages import Structured

NUMBER = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
NAMES = ("count", "count_more")
THOUGHT = "<|channel|>analysis<|message|>Hm, <|end.<|end|><|start|>assistant"
SAID = THOUGHT.replace("analysis", "commentary")
FINAL = "<|channel|>final<|message|>"
HEADERS = [
    "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.{}<|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.{} json<|message|>",
    "<|channel|>commentary to=functions.{}<|message|>",
    " to=functions.{}<|channel|>commentary json<|message|>",
]


@pytest.fixture(params=[MARKS, long(())], ids=["tokens", "spelled"])
def marks(request: pytest.FixtureRequest) -> tuple[str, ...]:
    known: tuple[str, ...] = request.param
    return known


def tools(*, strict: bool = True) -> list[Tool]:
    return [Tool(type="function", function=Function(name=name, parameters=NUMBER, strict=strict)) for name in NAMES]


def check(form: Structured, marks: tuple[str, ...], right: list[str], wrong: list[str]) -> None:
    for text in right:
        assert fits(form, text, marks, special=True), text
    for text in wrong:
        assert not fits(form, text, marks, special=True), text


def test_a_call_that_must_come(marks: tuple[str, ...]) -> None:
    form = after_analysis(forced_call(tools(), "harmony", ids_of(marks)), ids_of(marks), has_begun=True)
    heads = [thought + header.format(name) for thought in ("", THOUGHT * 2) for header in HEADERS for name in NAMES]
    check(form, marks, [head + '{"n": 1}' for head in heads], [head + '{"n": 3}' for head in heads])
    others = [f'{HEADERS[0].format("other")}{{"n": 1}}', f"{FINAL}x", '{"n": 1}', f'{SAID}{heads[0]}{{"n": 1}}']
    check(form, marks, [], others)


def test_strict_calls_or_any_text(marks: tuple[str, ...]) -> None:
    form = after_analysis(strict_calls(tools(), "harmony", ids_of(marks)), ids_of(marks), has_begun=True)
    before = ["", THOUGHT, SAID, THOUGHT + SAID + THOUGHT]
    call = HEADERS[0].format("count_more")
    check(form, marks, [one + f'{call}{{"n": 1}}' for one in before], [one + f"{call}{{}}" for one in before])
    check(form, marks, [one + f"{FINAL}Hello {{" for one in before] + [SAID.partition("<|end|>")[0]], [])


def test_a_call_or_an_answer_of_its_form(marks: tuple[str, ...]) -> None:
    either = call_or(Structured(choice=("yes",)), tools(strict=False), "harmony", ids_of(marks))
    form = after_analysis(either, ids_of(marks), has_begun=False)
    call = f"{HEADERS[0].format('count')}{{}}"
    starts = ["<|start|>assistant", f"<|start|>assistant{THOUGHT}"]
    check(form, marks, [start + end for start in starts for end in (call, f"{FINAL}yes")], [call, f"{FINAL}yes"])
    check(form, marks, [], [start + end for start in starts for end in ("yes", f"{FINAL}no", f"{SAID}{call}")])


def test_a_form_alone(marks: tuple[str, ...]) -> None:
    form = final_message(Structured(json_schema=NUMBER), ids_of(marks))
    form = after_analysis(form, ids_of(marks), has_begun=True)
    check(form, marks, [f'{start}{FINAL}{{"n":1}}' for start in ("", THOUGHT)], ['{"n":1}', f"{FINAL}{{}}", THOUGHT])


TOOL: Any = {"type": "function", "function": {"name": "count", "parameters": NUMBER}}
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER}}
FORCED: Any = {"tools": [TOOL], "tool_choice": "required"}
STRICT: Any = {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]}
FORMS: list[Any] = [
    FORCED,
    {"response_format": SCHEMA},
    {"extra_body": {"structured_outputs": {"choice": ["ja", "nein"]}}},
    {**STRICT, "response_format": SCHEMA},
]
TURN: Any = [{"role": "user", "content": "the cat"}]
SOON = 8
"""Enough to end a thought before max_tokens, and not at once."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("harmony") / "model"
    shutil.copytree(checkpoint("llama"), folder)
    words = copy.deepcopy(tokenizer(VOCAB_SIZE - len(MARKS)))
    words.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS], special_tokens=True)
    words.chat_template = TEMPLATE
    words.save_pretrained(folder)
    ends = words.convert_tokens_to_ids(["<|return|>", "<|call|>"])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    flags = ["--device", "cpu", "--kv-cache-memory", "16MiB", "--served-model-name", "tiny", "--no-log-requests"]
    with Daemon(str(folder), *flags, "--http", f"127.0.0.1:{free_port()}") as daemon:
        yield daemon.http


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def bias(*, thinks: bool) -> dict[str, int]:
    """Of the mark that ends a thought, and of the letter that `analysis` begins with."""
    end = VOCAB_SIZE - len(MARKS) + MARKS.index("<|end|>")
    letter = tokenizer(VOCAB_SIZE - len(MARKS)).convert_tokens_to_ids("a")
    return {str(end): 2 * SOON, str(letter): SOON if thinks else -100}


def is_right(form: Any, content: str | None, calls: list[Any]) -> bool:
    if calls:
        ((name, arguments),) = [(call.name, call.arguments) for call in calls]
        return "tools" in form and not content and name == "count" and json.loads(arguments)["n"] in (1, 2)
    assert content is not None
    if "extra_body" in form:
        return content in ("ja", "nein")
    return form is not FORCED and json.loads(content)["n"] in (1, 2)


def test_it_thinks_or_not_and_has_the_form(client: OpenAI) -> None:
    ask: Any = {"model": "tiny", "messages": TURN, "max_tokens": 400}
    asked = [
        (form, {"seed": seed, "logit_bias": bias(thinks=thinks)})
        for form in FORMS
        for seed, thinks in ((1, True), (2, True), (3, False))
    ]

    def answered(one: Any) -> Any:
        return client.chat.completions.create(**ask, **one[0], **one[1]).choices[0]

    def streamed(one: Any) -> Any:
        return [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **ask, **one[0], **one[1])]

    thoughts = []
    for (form, _), choice, chunks in zip(asked, at_once(answered, asked), at_once(streamed, asked), strict=True):
        calls = [call.function for call in choice.message.tool_calls or ()]
        assert is_right(form, choice.message.content, calls), choice
        assert choice.finish_reason == ("tool_calls" if calls else "stop")
        thoughts.append(getattr(choice.message, "reasoning_content", ""))
        deltas = [chunk.delta for chunk in chunks]
        assert "".join(delta.content or "" for delta in deltas) == (choice.message.content or "")
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == thoughts[-1]
        told = [call.function for delta in deltas for call in delta.tool_calls or ()]
        assert [(one.name, one.arguments) for one in told] == [(one.name, one.arguments) for one in calls]
        assert chunks[-1].finish_reason == choice.finish_reason
    assert any(thoughts)
    assert not all(thoughts)


def test_strict_tools_are_called_right_or_not_at_all(client: OpenAI) -> None:
    ask: Any = {"model": "tiny", "messages": TURN, "max_tokens": 100, "logit_bias": bias(thinks=True), **STRICT}

    def answered(seed: int) -> Any:
        return client.chat.completions.create(seed=seed, **ask).choices[0].message

    for message in at_once(answered, range(8)):
        for call in message.tool_calls or ():
            assert json.loads(call.function.arguments)["n"] in (1, 2)


def test_in_the_other_apis(url: str, client: OpenAI) -> None:
    more = {"seed": 1, "logit_bias": bias(thinks=True)}
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": NUMBER}}
    ask: Any = {"model": "tiny", "input": "the cat", "max_output_tokens": 400, "text": form, "extra_body": more}
    answer = client.responses.create(**ask)
    assert json.loads(answer.output_text)["n"] in (1, 2)
    events = list(client.responses.create(stream=True, **ask))
    assert events[-1].response.output_text == answer.output_text
    anthropic: Any = {"model": "tiny", "max_tokens": 400, "messages": TURN, "tool_choice": {"type": "any"}}
    anthropic["tools"] = [{"name": "count", "input_schema": NUMBER}]
    with Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as other:
        message = other.messages.create(**anthropic, extra_body=more)
        with other.messages.stream(**anthropic, extra_body=more) as stream:
            final = stream.get_final_message()
    for one in (message, final):
        call = one.content[-1]
        assert call.type == "tool_use"
        assert (call.name, call.input["n"] in (1, 2), one.stop_reason) == ("count", True, "tool_use")  # type: ignore[index]


def test_an_answer_in_a_form_that_goes_on(client: OpenAI) -> None:
    begun = [*TURN, {"role": "assistant", "content": "n"}]
    body = {"continue_final_message": True, "structured_outputs": {"choice": ["ein"]}}
    message = client.chat.completions.create(model="tiny", messages=begun, extra_body=body).choices[0].message
    assert message.content == "ein"
