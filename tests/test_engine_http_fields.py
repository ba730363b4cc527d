"""No field is accepted and ignored: each that there is changes the answer, or is refused by name.

The tables below have to name every field of the parameters and of both HTTP bodies; what is new is missed here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai import OpenAI

from checkpoints import checkpoint, tokenizer
from daemon import Daemon, free_port
from tercet.engine.openai_requests import ChatCompletionRequest, CompletionRequest
from tercet.ipc.client import Client, RequestRefused
from tercet.ipc.messages import SamplingParams, Structured

PROMPT = "the cat sat on the mat and one two three four five six seven eight nine ten"
EOS = {"ignore_eos": False}
BEGUN = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "the cat"}]


@dataclass(frozen=True)
class Case:
    value: Any
    beside: dict[str, Any] = field(default_factory=dict)
    """What else is in the request, with the field and without it."""
    refused: bool = False


def refused(value: Any) -> Case:
    return Case(value, refused=True)


def bias(word: str) -> dict[str, Any]:
    return {"logit_bias": {str(tokenizer().convert_tokens_to_ids(word)): 100}}


ENDS = {**EOS, **bias("<|im_end|>")}
LETTERS = ["a", "e", "i", "o", "t"]
AGAIN = {"logit_bias": {str(token_id): 9 for token_id in range(50, 60)}}
"""A few tokens come more than once."""
SAMPLING = {
    "max_tokens": Case(5),
    "min_tokens": Case(9, ENDS),
    "temperature": Case(0.2),
    "top_p": Case(0.1),
    "top_k": Case(1),
    "min_p": Case(0.9),
    "seed": Case(8),
    "stop": Case(LETTERS),
    "stop_token_ids": Case([264], bias(tokenizer().convert_ids_to_tokens(264))),
    "include_stop_str_in_output": Case(True, {"stop": LETTERS}),
    "ignore_eos": Case(True, ENDS),
    "skip_special_tokens": Case(False, bias("<|endoftext|>")),
    "repetition_penalty": Case(0.3),
    "presence_penalty": Case(-2.0, AGAIN),
    "frequency_penalty": Case(-2.0, AGAIN),
    "logit_bias": Case({"50": 20}),
    "logprobs": Case(1),
    "prompt_logprobs": Case(1),
    "spaces_between_special_tokens": refused(False),
    "truncate_prompt_tokens": Case(3),
}
"""What the HTTP door has in common with the engine."""
ENGINE_ONLY = {
    "n": Case(2),
    "structured": Case(Structured(choice=("one", "two")), EOS),
    "detokenize": Case(False),
    "adapter": refused("sql"),
}
EXTRAS = {
    "model": refused("other"),
    "stream": Case(True),
    "stream_options": refused({"include_usage": True}),
    "user": Case("someone"),
    "safety_identifier": Case("somebody"),
    "metadata": Case({"job": "a"}),
    "prompt_cache_key": Case("mine"),
    "n": Case(2),
    "structured_outputs": Case({"choice": ["one", "two"]}, EOS),
    "cache_salt": Case("mine"),
    "priority": refused(2**40),
    "queue_timeout": refused(-1),
    "timeout": refused(1e8),
    "return_token_ids": Case(True),
}
COMPLETION = {
    "prompt": Case("the dog"),
    "echo": Case(True),
    "suffix": refused("x"),
    "best_of": refused(2),
}
CHAT = {
    "messages": Case([{"role": "user", "content": "x"}]),
    "max_completion_tokens": Case(5, {"max_tokens": None, "max_completion_tokens": 9}),
    "tools": refused([{"type": "function", "function": {"name": "f"}}]),
    "tool_choice": refused("auto"),
    "parallel_tool_calls": refused(False),
    "chat_template_kwargs": refused({"anything": True}),
    "reasoning_effort": refused("utmost"),
    "add_generation_prompt": Case(False),
    "continue_final_message": Case(True, {"messages": BEGUN}),
    "response_format": Case({"type": "json_object"}, EOS),
    "logprobs": Case(True),
    "top_logprobs": Case(1, {"logprobs": True}),
    "store": refused(True),
    "service_tier": refused("flex"),
    "modalities": refused(["audio"]),
    "functions": refused([]),
    "function_call": refused("auto"),
    "audio": refused({}),
    "prediction": refused({}),
}
SILENT = ("user", "safety_identifier", "metadata", "prompt_cache_key")
"""They do not change an answer: into the log, which another test reads, and of the last nothing is wanted."""
UNKNOWN = {
    "use_beam_search": True,
    "verbosity": "low",
    "length_penalty": 1.0,
    "guided_json": {},
    "bad_words": ["x"],
}
BODIES = {
    "/v1/completions": (CompletionRequest, {"prompt": PROMPT}, {**SAMPLING, **EXTRAS, **COMPLETION}),
    "/v1/chat/completions": (
        ChatCompletionRequest,
        {"messages": [{"role": "user", "content": PROMPT}]},
        {**SAMPLING, **EXTRAS, **CHAT},
    ),
}
FIELDS = [(path, name) for path, (_, _, cases) in BODIES.items() for name in cases]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    flags = ["--device", "cpu", "--kv-cache-memory", "16MiB", "--served-model-name", "tiny", "--page-size", "16"]
    with Daemon(str(checkpoint("llama")), *flags, "--http", f"127.0.0.1:{free_port()}") as daemon:
        yield daemon


def test_the_tables_are_complete() -> None:
    assert set(SAMPLING) | set(ENGINE_ONLY) == set(SamplingParams.__struct_fields__)
    for kind, _, cases in BODIES.values():
        assert set(cases) == set(kind.__struct_fields__)


def ask(daemon: Daemon, path: str, body: dict[str, Any]) -> httpx.Response:
    base = {"temperature": 1.0, "seed": 7, "max_tokens": 12, "ignore_eos": True}
    return httpx.post(daemon.http + path, json={**base, **BODIES[path][1], **body}, timeout=30)


def said(answer: httpx.Response) -> Any:
    """What does not change from one time to the next."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        return "events"
    body = answer.json()
    assert body.pop("id")
    assert body.pop("created")
    return body


@pytest.fixture(scope="module")
def without(daemon: Daemon) -> Callable[[str, dict[str, Any]], Any]:
    """What is said to a request without the field in question."""
    known: dict[str, Any] = {}

    def ask_once(path: str, beside: dict[str, Any]) -> Any:
        key = f"{path} {beside}"
        if key not in known:
            ask(daemon, path, beside)  # what of a prompt is in the cache is said, too
            known[key] = said(ask(daemon, path, beside))
        return known[key]

    return ask_once


@pytest.mark.parametrize(("path", "name"), FIELDS)
def test_of_http(daemon: Daemon, without: Callable[[str, dict[str, Any]], Any], path: str, name: str) -> None:
    case = BODIES[path][2][name]
    answer = ask(daemon, path, {**case.beside, name: case.value})
    if case.refused:
        assert answer.status_code == (404 if name == "model" else 400)
        assert answer.json()["error"]["param"].split("[")[0].split(".")[0] == name
    elif name in SILENT:
        assert said(answer) == without(path, case.beside)
    else:
        assert said(answer) != without(path, case.beside)


def test_the_same_is_said_again(daemon: Daemon, without: Callable[[str, dict[str, Any]], Any]) -> None:
    """Else all of this would prove nothing."""
    for path in BODIES:
        assert said(ask(daemon, path, {})) == without(path, {})


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known(daemon: Daemon, path: str, name: str) -> None:
    answer = ask(daemon, path, {name: UNKNOWN[name]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


@pytest.mark.parametrize("name", [*SAMPLING, *ENGINE_ONLY])
async def test_of_the_engine(daemon: Daemon, name: str) -> None:
    case = {**SAMPLING, **ENGINE_ONLY}[name]
    base = {"temperature": 1.0, "seed": 7, "max_tokens": 12, "ignore_eos": True, **case.beside}
    async with Client(daemon.address) as client:

        async def answer(given: dict[str, Any]) -> Any:
            params = msgspec.convert(msgspec.to_builtins(given), SamplingParams, strict=False)
            generations = await client.generate_several(PROMPT, params)
            return [msgspec.structs.replace(one, usage=None) for one in generations]

        if case.refused:
            with pytest.raises(RequestRefused, match=f"^{name} "):
                await answer({**base, name: case.value})
        else:
            assert await answer({**base, name: case.value}) != await answer(base)


@pytest.mark.parametrize(
    ("change", "kind", "param", "words"),
    [
        ({"model": "other"}, openai.NotFoundError, "model", "'other'; want 'tiny'"),
        ({"temperature": -1}, openai.BadRequestError, "temperature", "temperature is -1"),
        ({"top_p": 2}, openai.BadRequestError, "top_p", "at most 1"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens", "at least 1"),
        ({"max_tokens": 9999}, openai.BadRequestError, "max_tokens", "maximum context length is 512"),
        (
            {"max_completion_tokens": 9999, "max_tokens": None},
            openai.BadRequestError,
            "max_completion_tokens",
            "max_completion_tokens is 9999; want at most",
        ),
        ({"logprobs": True, "top_logprobs": 21}, openai.BadRequestError, "top_logprobs", "top_logprobs is 21"),
        ({"logit_bias": {"5": 101}}, openai.BadRequestError, "logit_bias", "of token 5 is 101"),
        ({"seed": "x"}, openai.BadRequestError, "seed", "Expected `int | null`"),
        ({"stop": ["x"] * 17}, openai.BadRequestError, "stop", "at most 16"),
        ({"messages": []}, openai.BadRequestError, "messages", "length >= 1"),
        ({"messages": [{"role": "user"}]}, openai.BadRequestError, "messages[0].content", "want text"),
        (
            {"messages": [{"role": "user", "content": "x " * 600}]},
            openai.BadRequestError,
            "messages",
            "maximum context length is 512",
        ),
        ({"metadata": {"k" * 65: "v"}}, openai.BadRequestError, "metadata", "at `key` in `$.metadata`"),
        ({"extra_body": {"best_of": 3}}, openai.BadRequestError, "best_of", "unknown field `best_of`"),
        ({"extra_body": {"max_completion_tokens": 3}}, openai.BadRequestError, "max_completion_tokens", "one of them"),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "stream_options", "without stream"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_through_openai_s_client(
    daemon: Daemon, change: dict[str, object], kind: type[openai.APIStatusError], param: str, words: str, stream: bool
) -> None:
    if stream and "stream_options" in change:
        return
    arguments = {
        "model": "tiny",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 5,
        "stream": stream,
        **change,
    }
    url = f"{daemon.http}/v1"
    with OpenAI(base_url=url, api_key="any", max_retries=0, timeout=30) as client, pytest.raises(kind) as refused:
        client.chat.completions.create(**arguments)  # type: ignore[call-overload]
    assert refused.value.param == param
    assert words in str(refused.value)
    assert refused.value.type == ("not_found_error" if kind is openai.NotFoundError else "invalid_request_error")


def test_a_completion_s_length_that_is_null_is_all_the_room(daemon: Daemon) -> None:
    usage = said(ask(daemon, "/v1/completions", {"prompt": [5] * 480, "max_tokens": None}))["usage"]
    assert usage["total_tokens"] == 512


@pytest.mark.parametrize("path", BODIES)
def test_a_request_has_so_long(daemon: Daemon, path: str) -> None:
    answer = ask(daemon, path, {"max_tokens": 300, "timeout": 0.001})
    assert (answer.status_code, answer.headers.get("x-should-retry")) == (504, "false")  # else clients ask again
    assert answer.json()["error"]["code"] == "timed_out"
    stream = ask(daemon, path, {"max_tokens": 300, "timeout": 0.05, "stream": True})
    assert stream.status_code == 504 or '"code":"timed_out"' in stream.text.split("data: ")[-2]
