"""Answers of a prescribed form where the prompt has opened the model's reasoning, or the model may.

The weights are random: the mask alone has the answer begin after it.
"""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from openai.types.responses import ResponseReasoningItem
from tokenizers import AddedToken

from at_once import at_once
from checkpoints import checkpoint, tokenizer
from daemon import Daemon, free_port
from families import VOCAB_SIZE
from tercet.engine.reasoning import BRACKETS, CHANNEL, THINK, Tags

TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}{{ messages[0].content }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>\n{% endif %}"
)
NUMBER = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "count", "parameters": NUMBER}}
FORCED = {"tools": [TOOL], "tool_choice": "required"}
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER}}}
CHOICE = {"extra_body": {"structured_outputs": {"choice": ["ja", "nein"]}}}
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 400}
SOON = 6
"""Enough to end the reasoning before max_tokens, and not at once."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    yield from serve(tmp_path_factory.mktemp("thought") / "model", TEMPLATE)


@pytest.fixture(
    scope="module", params=[THINK, *(pytest.param(tags, marks=pytest.mark.long) for tags in (BRACKETS, CHANNEL))]
)
def unopened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A model that opens its reasoning itself, as the first Qwen3 do; and as others, by special tokens."""
    template = TEMPLATE.replace("<think>\n", "")
    tags = request.param
    for mark, other in ((THINK.opening, tags.opening + tags.name), (THINK.closing, tags.closing)):
        template = template.replace(mark, other)
    yield from serve(tmp_path_factory.mktemp("unopened") / "model", template, tags)


def serve(folder: Path, template: str, tags: Tags = THINK) -> Iterator[OpenAI]:
    shutil.copytree(checkpoint("llama"), folder)
    words = copy.deepcopy(tokenizer(VOCAB_SIZE - 4))
    words.add_tokens(["<tool_call>", "</tool_call>"])
    words.add_tokens([AddedToken(tag, special=tags is not THINK, normalized=False) for tag in tags[:2]])
    words.chat_template = template
    words.save_pretrained(folder)
    ASK["logit_bias"] = {str(len(words) - 1): SOON}
    flags = ["--device", "cpu", "--kv-cache-memory", "8MiB", "--served-model-name", "tiny", "--no-log-requests"]
    with (
        Daemon(str(folder), *flags, "--http", f"127.0.0.1:{free_port()}") as daemon,
        OpenAI(base_url=f"{daemon.http}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def is_right(form: dict[str, Any], content: str | None, calls: list[tuple[str, str]]) -> bool:
    if form is FORCED:
        ((name, arguments),) = calls
        return not content and name == "count" and json.loads(arguments)["n"] in (1, 2)
    assert content is not None
    return not calls and (content in ("ja", "nein") if form is CHOICE else json.loads(content)["n"] in (1, 2))


@pytest.mark.parametrize("form", [FORCED, SCHEMA, CHOICE])
def test_it_thinks_and_then_answers(client: OpenAI, form: dict[str, Any]) -> None:
    def answered(seed: int) -> Choice:
        return client.chat.completions.create(seed=seed, **ASK, **form).choices[0]

    thoughts = []
    for choice in at_once(answered, range(3)):
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        assert is_right(form, choice.message.content, calls), choice
        thoughts.append(getattr(choice.message, "reasoning_content", ""))
    assert any(thoughts)
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, seed=2, **ASK, **form)]
    streamed = [call.function for delta in deltas for call in delta.tool_calls or ()]
    content = "".join(delta.content or "" for delta in deltas)
    assert is_right(form, content, [(call.name, call.arguments) for call in streamed])
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == thoughts[2]


@pytest.mark.parametrize("form", [FORCED, SCHEMA, CHOICE])
def test_told_not_to_think_it_answers_at_once(client: OpenAI, form: dict[str, Any]) -> None:
    more = {**form, "extra_body": {**form.get("extra_body", {}), "chat_template_kwargs": {"thinking": False}}}
    message = client.chat.completions.create(seed=1, **ASK, **more).choices[0].message
    assert is_right(
        form, message.content, [(one.function.name, one.function.arguments) for one in message.tool_calls or ()]
    )
    assert not hasattr(message, "reasoning_content")


@pytest.mark.parametrize("form", [FORCED, SCHEMA, CHOICE])
@pytest.mark.parametrize(("wants", "told", "thinks"), [(100, None, True), (-100, None, False), (100, False, False)])
def test_a_model_that_opens_its_reasoning_itself(
    unopened: OpenAI, form: dict[str, Any], wants: int, told: bool | None, thinks: bool
) -> None:
    more = {
        **form.get("extra_body", {}),
        **({} if told is None else {"chat_template_kwargs": {"enable_thinking": told}}),
    }
    (end,) = ASK["logit_bias"]
    ask = {**ASK, **form, "extra_body": more, "logit_bias": {end: SOON, str(int(end) - 1): wants}}

    def answered(seed: int) -> ChatCompletionMessage:
        return unopened.chat.completions.create(seed=seed, **ask).choices[0].message

    thoughts = []
    for message in at_once(answered, range(3)):
        calls = [(one.function.name, one.function.arguments) for one in message.tool_calls or ()]
        assert is_right(form, message.content, calls), message
        thoughts.append(getattr(message, "reasoning_content", ""))
    assert any(thoughts) == thinks


def test_in_items(client: OpenAI) -> None:
    """The same answer, asked for by the other API, which also says how much of it is reasoning."""
    chat = client.chat.completions.create(seed=2, **ASK, **SCHEMA, extra_body={"return_token_ids": True}).choices[0]
    more = {"seed": 2, "logit_bias": ASK["logit_bias"]}
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": NUMBER}}
    answer = client.responses.create(model="tiny", input="the cat", max_output_tokens=400, text=form, extra_body=more)
    thought, message = answer.output
    assert isinstance(thought, ResponseReasoningItem)
    assert thought.content is not None
    assert thought.content[0].text == chat.message.reasoning_content  # type: ignore[attr-defined]
    assert message.type == "message"
    assert answer.output_text == chat.message.content
    assert answer.usage is not None
    token_ids: list[int] = chat.token_ids  # type: ignore[attr-defined]
    (close,) = map(int, ASK["logit_bias"])
    assert answer.usage.output_tokens == len(token_ids)
    assert answer.usage.output_tokens_details.reasoning_tokens == token_ids.index(close) + 1


@pytest.mark.parametrize("schema", ['{"type": "object"', "[]", {"not": {"const": 3}}])
def test_what_is_no_form_is_refused(client: OpenAI, schema: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(extra_body={"structured_outputs": {"json": schema}}, **ASK)
    assert refused.value.param == "structured_outputs"
