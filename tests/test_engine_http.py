"""The HTTP door of a whole engine, through the official `openai` client and through curl.

What it says is compared with what the engine's own client gets.
"""

import asyncio
import contextlib
import json
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from checkpoints import checkpoint, tokenizer
from daemon import Daemon, free_port
from tercet.ipc.client import Client
from tercet.ipc.messages import ChatMessage, SamplingParams

KEYS = ("sesame-one", "sesame-two")
TURNS = [{"role": "user", "content": "the cat sat on the mat"}]
GREEDY = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    keys = [argument for key in KEYS for argument in ("--api-key", key)]
    flags = ["--device", "cpu", "--kv-cache-memory", "16MiB", "--served-model-name", "tiny", "--page-size", "16"]
    http = ["--http", f"127.0.0.1:{free_port()}"]
    with Daemon(str(checkpoint("llama")), *flags, *http, *keys) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{daemon.http}/v1", api_key=KEYS[0], max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
async def aclient(daemon: Daemon) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{daemon.http}/v1", api_key=KEYS[1], max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def raw(daemon: Daemon) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=daemon.http, headers={"authorization": f"Bearer {KEYS[0]}"}, timeout=30) as client:
        yield client


def prompt_ids() -> list[int]:
    ids: list[int] = tokenizer().apply_chat_template(TURNS, add_generation_prompt=True)["input_ids"]
    return ids


async def engine_says(daemon: Daemon, prompt: object, num_tokens: int) -> str:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    async with Client(daemon.address) as client:
        return (await client.generate(prompt, params)).text  # type: ignore[arg-type]


async def num_steps_when_idle(daemon: Daemon, more_than: int = -1) -> int:
    """How much the engine has computed, once that is more and nothing runs any more."""
    deadline = time.monotonic() + 20
    async with Client(daemon.address) as client:
        while True:
            await asyncio.sleep(0.4)  # the gauges are refreshed some times a second
            info = await client.info()
            if not info.num_running + info.num_waiting and info.num_steps > more_than:
                return info.num_steps
            assert time.monotonic() < deadline, "the request goes on although its client has left"


async def test_chat_whole_and_streamed(daemon: Daemon, client: OpenAI) -> None:
    wanted = await engine_says(daemon, [ChatMessage("user", TURNS[0]["content"])], 24)
    whole = client.chat.completions.create(model="tiny", messages=TURNS, **GREEDY)
    assert whole.choices[0].message.content == wanted
    assert (whole.choices[0].finish_reason, whole.object, whole.model) == ("length", "chat.completion", "tiny")
    num_prompt = len(prompt_ids())
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (num_prompt, 24)
    assert whole.usage.total_tokens == num_prompt + 24

    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="tiny", messages=TURNS, **GREEDY, **options))
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    *texts, end, usage = chunks
    assert texts[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in texts[1:])
    assert all(chunk.choices[0].finish_reason is None for chunk in texts)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in texts) == wanted
    assert len(texts) > 3
    assert (end.choices[0].finish_reason, end.choices[0].delta.content) == ("length", None)
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 24
    assert usage.usage.prompt_tokens_details is not None
    assert usage.usage.prompt_tokens_details.cached_tokens == num_prompt // 16 * 16


async def test_completions_of_several_prompts(daemon: Daemon, client: OpenAI) -> None:
    prompts = ["the cat", "a tercet is", "one two three four"]
    wanted = [await engine_says(daemon, prompt, 24) for prompt in prompts]
    whole = client.completions.create(model="tiny", prompt=prompts, **GREEDY)
    assert [choice.text for choice in whole.choices] == wanted
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = ["", "", ""]
    reasons: list[str | None] = [None, None, None]
    for chunk in client.completions.create(model="tiny", prompt=prompts, stream=True, **GREEDY):
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert (texts, reasons) == (wanted, ["length"] * 3)
    ids = tokenizer().encode(prompts[1])
    assert client.completions.create(model="tiny", prompt=ids, **GREEDY).choices[0].text == wanted[1]
    assert client.completions.create(model="tiny", prompt=[ids, ids], **GREEDY).choices[1].text == wanted[1]
    short = client.completions.create(model="tiny", prompt="the cat", temperature=0, extra_body={"ignore_eos": True})
    assert short.usage is not None
    assert short.usage.completion_tokens == 16


async def test_the_answer_ends_before_a_stop_string(daemon: Daemon, client: OpenAI) -> None:
    text = await engine_says(daemon, "the cat", 24)
    stop = text[8:10]
    answer = client.completions.create(model="tiny", prompt="the cat", stop=[stop], **GREEDY).choices[0]
    assert (answer.text, answer.finish_reason) == (text[: text.index(stop)], "stop")
    assert answer.model_extra is not None
    assert answer.model_extra["stop_reason"] == stop
    ask: Any = {"model": "tiny", "messages": TURNS, **GREEDY}
    said = client.chat.completions.create(**ask).choices[0]
    assert said.model_extra == {"stop_reason": None}
    stop = (said.message.content or "")[8:10]
    assert client.chat.completions.create(stop=stop, **ask).choices[0].model_extra == {"stop_reason": stop}
    *others, end = client.chat.completions.create(stop=stop, stream=True, **ask)
    assert (end.choices[0].finish_reason, end.choices[0].model_extra) == ("stop", {"stop_reason": stop})
    assert not any(chunk.choices[0].model_extra for chunk in others)


def test_several_answers_to_one_prompt(client: OpenAI) -> None:
    sampled = {"model": "tiny", "messages": TURNS, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    alone = [client.chat.completions.create(seed=seed, **sampled).choices[0].message.content for seed in (7, 8, 9)]
    whole = client.chat.completions.create(seed=7, n=3, **sampled)
    assert [choice.message.content for choice in whole.choices] == alone
    assert len(set(alone)) == 3
    assert whole.usage is not None
    assert (whole.usage.completion_tokens, whole.usage.prompt_tokens) == (36, len(prompt_ids()))
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(seed=7, n=3, stream=True, **sampled):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == alone
    assert len({choice.text for choice in client.completions.create(model="tiny", prompt="the", n=4).choices}) == 4
    with pytest.raises(openai.BadRequestError, match="n is 0; want 1 to 256"):
        client.completions.create(model="tiny", prompt="the", n=0)


async def test_what_shapes_sampling_gets_through(daemon: Daemon, client: OpenAI) -> None:
    shapes = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    params = SamplingParams(
        temperature=0,
        max_tokens=24,
        ignore_eos=True,
        repetition_penalty=1.3,
        logit_bias={50: 3.0, 60: -100.0},
        **shapes,
    )
    async with Client(daemon.address) as own:
        wanted = (await own.generate("the cat", params)).text
    assert wanted != await engine_says(daemon, "the cat", 24)
    have = client.completions.create(
        model="tiny",
        prompt="the cat",
        temperature=0,
        max_tokens=24,
        logit_bias={"50": 3, "60": -100},
        extra_body={"ignore_eos": True, "repetition_penalty": 1.3},
        **shapes,
    )
    assert have.choices[0].text == wanted


async def test_many_at_once(aclient: AsyncOpenAI) -> None:
    async def ask(number: int) -> tuple[int, str]:
        text = ""
        async for chunk in await aclient.completions.create(
            model="tiny", prompt=f"number {number % 3}", stream=True, **GREEDY
        ):
            text += chunk.choices[0].text
        return number % 3, text

    answers = await asyncio.gather(*map(ask, range(30)))
    assert len(set(answers)) == 3


async def test_leaving_cancels(daemon: Daemon, aclient: AsyncOpenAI) -> None:
    """The streamed request, and the one whose answer would come whole."""
    endless = {"model": "tiny", "prompt": "the cat", "max_tokens": 500, "extra_body": {"ignore_eos": True}}
    before = await num_steps_when_idle(daemon)
    async with await aclient.completions.create(stream=True, **endless) as stream:
        await anext(stream)
    after_stream = await num_steps_when_idle(daemon, before)
    assert after_stream < before + 400
    with pytest.raises(openai.APITimeoutError):
        await aclient.completions.create(timeout=0.05, **endless)
    await engine_says(daemon, "x", 2)  # it may have been too early to begin
    assert await num_steps_when_idle(daemon, after_stream) < after_stream + 400


def test_models_tokens_and_versions(client: OpenAI, raw: httpx.Client) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.model_extra) == ("tiny", {"max_model_len": 512, "root": str(checkpoint("llama"))})
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")
    ids = tokenizer().encode("the cat 🙂")
    answer = raw.post("/tokenize", json={"prompt": "the cat 🙂"}).json()
    assert answer == {"count": len(ids), "max_model_len": 512, "tokens": ids}
    chat = prompt_ids()
    assert raw.post("/tokenize", json={"messages": TURNS}).json()["tokens"] == chat
    assert raw.post("/detokenize", json={"tokens": chat}).json() == {"prompt": tokenizer().decode(chat)}
    assert raw.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert raw.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
    assert raw.get("/version").json() == {"version": "0.1.0"}
    assert raw.get("/health").json() == {"status": "ok"}
    assert raw.get("/health/ready").json() == {"status": "ready"}


PATHS = ("/v1/models", "/v1/models/tiny", "/health", "/health/ready", "/version", "/metrics", "/nothing")


def test_every_route_wants_a_key(daemon: Daemon, client: OpenAI) -> None:
    for key in (None, "Bearer wrong", "Bearer", f"Basic {KEYS[0]}", KEYS[0], "Bearer é", f"Bearer {KEYS[0]} x"):
        headers = {} if key is None else {"authorization": key.encode()}
        for path in PATHS:
            answer = httpx.get(daemon.http + path, headers=headers)
            assert answer.status_code == 401, (key, path)
            assert answer.json()["error"]["type"] == "authentication_error"
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            assert httpx.post(daemon.http + path, headers=headers, json={}).status_code == 401, (key, path)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_requests_have_names(raw: httpx.Client) -> None:
    assert raw.get("/version", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made_up = {raw.get("/version", headers={"x-request-id": "a b"}).headers["x-request-id"] for _ in range(2)}
    assert len(made_up) == 2
    assert "a b" not in made_up


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"nul", b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 5000])
def test_bodies_that_are_none(raw: httpx.Client, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        answer = raw.post(path, content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_sizes_have_limits(raw: httpx.Client) -> None:
    answer = raw.post("/v1/completions", content=b" " * (64 * 2**20 + 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    for headers in ({"x-long": "x" * 40_000}, {f"x-{i}": "y" * 100 for i in range(400)}):
        with contextlib.suppress(httpx.TransportError):  # the door was shut while the rest was being sent
            assert raw.get("/version", headers=headers).status_code in (400, 431)
        assert raw.get("/version").status_code == 200
    answer = raw.get("/nothing/" + "x" * 1000)
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"
    assert raw.get("/v1/completions").status_code == 405
    assert raw.get("/v1/completions").headers["allow"] == "POST"


def test_curl_streams(daemon: Daemon) -> None:
    """Nothing of Python: the bytes as they are on the wire."""
    body = {"model": "tiny", "messages": TURNS, "stream": True, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    command = ["curl", "-sSN", "-D", "-", f"{daemon.http}/v1/chat/completions", "-d", json.dumps(body)]
    done = subprocess.run(
        [*command, "-H", f"Authorization: Bearer {KEYS[1]}"], capture_output=True, timeout=30, check=True
    )
    head, _, events = done.stdout.replace(b"\r\n", b"\n").partition(b"\n\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"content-type: text/event-stream" in head
    *chunks, done_event, rest = events.split(b"\n\n")
    assert (done_event, rest) == (b"data: [DONE]", b"")
    assert all(chunk.startswith(b"data: {") for chunk in chunks)
    deltas = [json.loads(chunk.removeprefix(b"data: "))["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
