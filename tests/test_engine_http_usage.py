"""What an answer says of its tokens: how many a stream has consumed so far, and which they are. A whole engine."""

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from transformers import AutoTokenizer

from checkpoints import checkpoint
from daemon import Daemon, free_port

ALWAYS = {"include_usage": True, "continuous_usage_stats": True}
TURNS = [{"role": "user", "content": "the cat sat on the mat"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": TURNS}),
    ("/v1/chat/completions", {"messages": TURNS, "n": 3, "logprobs": True}),
    ("/v1/completions", {"prompt": ["the cat", "a", "a tercet is a group of three lines"], "n": 2}),
    ("/v1/completions", {"prompt": [[5, 6, 7], [8]]}),
]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    flags = ["--device", "cpu", "--kv-cache-memory", "8MiB", "--served-model-name", "tiny", "--no-log-requests"]
    with (
        Daemon(str(checkpoint("llama")), *flags, "--http", f"127.0.0.1:{free_port()}") as daemon,
        httpx.Client(base_url=daemon.http, timeout=60) as client,
    ):
        yield client


def chunks_of(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    return [msgspec.json.decode(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_every_chunk_says_what_has_been_consumed(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    ask = {**body, "stream": True, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    *chunks, last = chunks_of(http.post(path, json={**ask, "stream_options": ALWAYS}))
    assert last["choices"] == []
    told = [chunk["usage"] for chunk in chunks]
    assert {one["prompt_tokens"] for one in told} == {last["usage"]["prompt_tokens"]}
    generated = [one["completion_tokens"] for one in told]
    assert generated == sorted(generated)
    assert generated[0] < generated[-1] == last["usage"]["completion_tokens"]
    assert all(one["total_tokens"] == one["prompt_tokens"] + one["completion_tokens"] for one in told)

    plain = chunks_of(http.post(path, json={**ask, "stream_options": {"include_usage": True}}))
    assert {chunk["usage"] is None for chunk in plain[:-1]} == {True}
    assert all("usage" not in chunk for chunk in chunks_of(http.post(path, json=ask)))
    assert said(plain) == said(chunks)


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_ids_of_prompts_and_answers(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """Prompts have those that transformers' tokenizer gives them, once for each answer; a stream tells the same."""
    reader = AutoTokenizer.from_pretrained(checkpoint("llama"))
    if "messages" in body:
        prompts = [reader.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=False)]
    else:
        prompts = [reader(one)["input_ids"] if isinstance(one, str) else one for one in body["prompt"]]
    num_each = body.get("n", 1)
    ask = {**body, "max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    whole = http.post(path, json=ask).json()
    if "messages" in body:
        assert whole["prompt_token_ids"] == prompts[0]
    else:
        told = [choice["prompt_token_ids"] for choice in whole["choices"]]
        assert told == [ids for ids in prompts for _ in range(num_each)]
    answers = [choice["token_ids"] for choice in whole["choices"]]
    assert [len(ids) for ids in answers] == [5] * len(prompts) * num_each

    of_prompts: dict[int, list[int]] = {}
    of_answers: dict[int, list[int]] = {index: [] for index in range(len(answers))}
    for chunk in chunks_of(http.post(path, json={**ask, "stream": True})):
        (choice,) = chunk["choices"]
        told_first = chunk if "messages" in body else choice
        if "prompt_token_ids" in told_first:
            assert choice["index"] not in of_prompts
            assert not of_answers[choice["index"]]
            of_prompts[choice["index"]] = told_first["prompt_token_ids"]
        of_answers[choice["index"]] += choice.get("token_ids", [])
    assert of_prompts == {index: prompts[index // num_each] for index in range(len(answers))}
    assert [of_answers[index] for index in sorted(of_answers)] == answers

    silent = http.post(path, json={**ask, "return_token_ids": False}).text
    assert "token_ids" not in silent


def test_in_anthropic_s_counting_input_is_what_the_cache_has_not(http: httpx.Client) -> None:
    """Whole and streamed, the second time much of the prompt is there already."""
    turns = [{"role": "user", "content": "the cat sat on the mat and one two three four five " * 6}]
    ask = {"messages": turns, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    length = http.post("/v1/messages/count_tokens", json={"messages": turns}).json()["input_tokens"]
    first, second = (http.post("/v1/messages", json=ask).json()["usage"] for _ in range(2))
    assert first == {
        "input_tokens": length,
        "output_tokens": 3,
        "cache_read_input_tokens": 0,
        "cache_creation_input_tokens": 0,
    }
    cached = second["cache_read_input_tokens"]
    assert 0 < cached < length
    assert second == {**first, "input_tokens": length - cached, "cache_read_input_tokens": cached}
    lines = http.post("/v1/messages", json={**ask, "stream": True}).text.splitlines()
    events = [msgspec.json.decode(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert events[0]["message"]["usage"]["input_tokens"] == length
    assert events[-2]["usage"] == second


def said(chunks: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


def test_what_is_refused_is_no_stream(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x " * 600}], "stream": True, "stream_options": ALWAYS}
    answer = http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert answer.json()["error"]["param"] == "messages"
    together = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 512, "stream": True})
    assert (together.status_code, together.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert together.json()["error"]["param"] == "max_tokens"
    assert "this model's maximum context length is 512" in together.json()["error"]["message"]
    alone = {"prompt": "x", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    answer = http.post("/v1/completions", json=alone)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")
    assert "without include_usage" in answer.text
