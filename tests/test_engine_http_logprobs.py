"""Log-probabilities through the HTTP door, as OpenAI's clients read them: those that the engine's own client gets."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from checkpoints import checkpoint
from daemon import Daemon, free_port
from tercet.ipc.client import Client, Generation
from tercet.ipc.messages import ChatMessage, SamplingParams

TURNS = [{"role": "user", "content": "naïve café 東京"}]
IGNORE_EOS = {"ignore_eos": True}
CLOSE = {"abs": 1e-4}
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    flags = ["--device", "cpu", "--kv-cache-memory", "16MiB", "--served-model-name", "tiny", "--page-size", "16"]
    with Daemon(str(checkpoint("llama")), *flags, "--http", f"127.0.0.1:{free_port()}") as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{daemon.http}/v1", api_key="any", max_retries=0, timeout=30) as client:
        yield client


async def engine_says(daemon: Daemon, prompt: str | list[ChatMessage]) -> Generation:
    async with Client(daemon.address) as client:
        return await client.generate(prompt, PARAMS)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat(daemon: Daemon, client: OpenAI, stream: bool) -> None:
    generation = await engine_says(daemon, [ChatMessage("user", TURNS[0]["content"])])
    answer = client.chat.completions.create(
        model="tiny", messages=TURNS, temperature=0, max_tokens=16, logprobs=True, top_logprobs=3, stream=stream,
        extra_body=IGNORE_EOS,
    )  # type: ignore[call-overload]  # fmt: skip
    chunks = list(answer) if stream else [answer]
    content = [
        one for chunk in chunks for choice in chunk.choices if choice.logprobs for one in choice.logprobs.content
    ]
    assert generation.logprobs is not None
    assert len(content) == len(generation.logprobs) == 16
    for got, (own, *top) in zip(content, generation.logprobs, strict=True):
        assert (got.token, bytes(got.bytes)) == (own.text, own.token)
        assert got.logprob == pytest.approx(own.logprob, **CLOSE)
        assert [one.token for one in got.top_logprobs] == [one.text for one in top]
        assert [one.logprob for one in got.top_logprobs] == pytest.approx([one.logprob for one in top], **CLOSE)


@pytest.mark.parametrize("stream", [False, True])
async def test_completion(daemon: Daemon, client: OpenAI, stream: bool) -> None:
    generation = await engine_says(daemon, "the cat")
    answer = client.completions.create(
        model="tiny", prompt="the cat", temperature=0, max_tokens=16, logprobs=3, stream=stream, extra_body=IGNORE_EOS
    )
    chunks = list(answer) if stream else [answer]  # type: ignore[arg-type]
    shown = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert generation.logprobs is not None
    assert [token for one in shown for token in one.tokens] == [row[0].text for row in generation.logprobs]
    numbers = [x for one in shown for x in one.token_logprobs]
    assert numbers == pytest.approx([row[0].logprob for row in generation.logprobs], **CLOSE)
    expected = [{one.text: one.logprob for one in reversed(row)} for row in generation.logprobs]
    for got, wanted in zip([top for one in shown for top in one.top_logprobs], expected, strict=True):
        assert got == pytest.approx(wanted, **CLOSE)
    assert shown[0].text_offset[0] == 0


def test_none_where_nobody_asked(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=TURNS, max_tokens=2)  # type: ignore[arg-type]
    assert answer.choices[0].logprobs is None
