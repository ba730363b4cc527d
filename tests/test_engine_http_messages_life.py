"""Anthropic's Messages through the HTTP door: who may ask, who leaves, what fails on the way, and what is counted."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from functools import partial

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic

from http_process import http_process
from played_messages import TEMPLATE, TURN, asked, make_client, next_submit, say
from tercet.ipc.step_messages import Abort, Unservable
from tokenizer_process import USAGE, TokenizerProcess, byte_checkpoint, tokenizer_process


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenizerProcess]:
    with tokenizer_process(byte_checkpoint(tmp_path_factory.mktemp("messages"), TEMPLATE), max_model_len=4096) as one:
        yield one


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncAnthropic]:
    async with make_client(url) as client:
        yield client


async def test_who_leaves_a_stream_has_its_request_cancelled(engine: TokenizerProcess, client: AsyncAnthropic) -> None:
    asking = asyncio.ensure_future(client.messages.create(**asked(stream=True)))
    submit = await next_submit(engine)
    engine.sample(submit.number, "Well, ")
    stream = await asking
    assert (await anext(aiter(stream))).type == "message_start"
    await stream.close()
    aborted = await asyncio.to_thread(engine.next_message)
    assert isinstance(aborted, Abort)
    assert memoryview(aborted.numbers).cast("q").tolist() == [submit.number]


def turn(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def test_a_failure_on_the_way_is_an_event(engine: TokenizerProcess, client: AsyncAnthropic) -> None:
    asking = asyncio.ensure_future(client.messages.create(**asked(stream=True, timeout=60, messages=turn("1"))))
    submit = await next_submit(engine)
    engine.sample(submit.number, "Well, ")
    kinds = []
    with pytest.raises(anthropic.APIStatusError, match="died twice") as failed:
        async for event in await asking:
            kinds.append(event.type)
            if event.type == "content_block_delta":
                engine.send(Unservable(submit.number, "kills_workers", "died twice"))
    assert kinds[0] == "message_start"
    assert "message_stop" not in kinds
    assert (failed.value.type, failed.value.error_code) == ("api_error", "kills_workers")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_is_a_status(engine: TokenizerProcess, client: AsyncAnthropic, stream: bool) -> None:
    other = turn(f"2 {stream}")  # what has killed workers is refused to whoever asks for the same
    for code, status, kind in (("overloaded", 429, "rate_limit_error"), ("kills_workers", 500, "api_error")):
        asking = asyncio.ensure_future(client.messages.create(**asked(stream=stream, messages=other)))
        submit = await next_submit(engine)
        engine.send(Unservable(submit.number, code, "not now"))
        with pytest.raises(anthropic.APIStatusError, match="not now") as failed:
            await asking
        assert (failed.value.status_code, failed.value.type) == (status, kind)
        assert failed.value.response.headers.get("x-should-retry") == ("false" if status == 500 else None)
        assert ("retry-after" in failed.value.response.headers) == (status == 429)


async def test_a_request_s_own_time(client: AsyncAnthropic, engine: TokenizerProcess) -> None:
    with pytest.raises(anthropic.GatewayTimeoutError) as failed:
        await client.messages.create(**asked(), extra_body={"timeout": 0.001})
    assert failed.value.type == "timeout_error"
    while engine.has_message():
        pass


async def test_keys(engine: TokenizerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anthropic's clients send `x-api-key`; with a token instead of a key they send what OpenAI's do."""
    with http_process(engine, api_key=("open-sesame", "another-key")) as url:
        for key in ("open-sesame", "another-key"):
            async with make_client(url, api_key=key) as client:
                assert (await say(engine, client, "x")).answer.content[0].text == "x"
                assert (await client.messages.count_tokens(model="tiny", messages=TURN)).input_tokens
        monkeypatch.setenv("ANTHROPIC_BASE_URL", url)
        monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "open-sesame")
        async with AsyncAnthropic(max_retries=0) as client:
            assert (await say(engine, client, "x")).answer.content[0].text == "x"
        async with make_client(url, api_key="open-sesam") as client:
            for ask in (partial(client.messages.create, max_tokens=1), client.messages.count_tokens):
                with pytest.raises(anthropic.AuthenticationError, match="x-api-key: KEY") as refused:
                    await ask(model="tiny", messages=TURN)
                assert refused.value.type == "authentication_error"
                assert refused.value.request_id == refused.value.body["request_id"]  # type: ignore[index]
        for headers in ({}, {"x-api-key": ""}, {"x-api-key": "Bearer open-sesame"}, {"authorization": "open-sesame"}):
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"x-api-key": "open-sesame"}).status_code == 200
        assert httpx.get(f"{url}/openapi.json", headers={"x-api-key": "open-sesame"}).json()["security"] == [
            {"key": []},
            {"x-api-key": []},
        ]


async def test_the_log_says_who_asked_and_what_became_of_it(
    engine: TokenizerProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    with http_process(engine, log_requests=True, api_key=("open-sesame",)) as url:
        async with make_client(url, api_key="open-sesame") as client:
            answer = (await say(engine, client, "x", metadata={"user_id": "someone"})).answer
            asking = asyncio.ensure_future(client.messages.create(**asked(stream=True, messages=turn("3"))))
            submit = await next_submit(engine)
            engine.sample(submit.number, "Well, ")
            stream = aiter(await asking)
            await anext(stream)
            engine.send(Unservable(submit.number, "kills_workers", "died twice"))
            with pytest.raises(anthropic.APIStatusError):
                while True:
                    await anext(stream)
        logged = ""
        async with asyncio.timeout(10):
            while logged.count("/v1/messages") < 2:
                await asyncio.sleep(0.02)
                logged += capfd.readouterr().err
    assert "sesame" not in logged
    whole, failed = (json.loads(line[line.index("{") :]) for line in logged.splitlines() if "/v1/messages" in line)
    assert (whole["answer_id"], whole["request_id"]) == (answer.id, answer._request_id)
    assert (whole["user"], whole["status"], whole["prompt_tokens"]) == ("someone", 200, USAGE.num_prompt_tokens)
    assert (failed["stream"], failed["error"]) == (True, "kills_workers")


def test_who_has_been_led_here(url: str) -> None:
    answer = httpx.post(f"{url}/v1/messages", headers={"host": "evil.example"}, json=asked())
    assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
    assert answer.json()["type"] == "error"


def test_paths_and_methods(url: str) -> None:
    for method, path, status, kind in (
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
    ):
        answer = httpx.request(method, url + path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
        assert answer.json()["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    of_openai = httpx.post(f"{url}/v1/messages_of_others")
    assert (of_openai.status_code, set(of_openai.json())) == (404, {"error"})
    assert "request-id" not in of_openai.headers


async def test_they_are_counted_like_others(engine: TokenizerProcess, client: AsyncAnthropic, url: str) -> None:
    def counted() -> list[float]:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        return [
            sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"tercet:{name}"))
            for name in (
                'http_responses_total{path="/v1/messages",status="200"',
                "e2e_request_latency_seconds_count",
                "prompt_tokens_total",
            )
        ]

    before = counted()
    await say(engine, client, "x")
    await say(engine, client, "x", stream=True)
    assert [after - was for after, was in zip(counted(), before, strict=True)] == [2, 2, 2 * USAGE.num_prompt_tokens]
