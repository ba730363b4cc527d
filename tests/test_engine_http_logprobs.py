"""Log-probabilities through the HTTP door, as OpenAI's clients read them: those that the engine's own client gets."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from openai import BadRequestError, OpenAI

from checkpoints import checkpoint, tokenizer
from daemon import Daemon, free_port
from tercet.engine.openai_logprobs import completion_logprobs
from tercet.ipc.answers import TokenLogprob
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
    if stream:
        assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].logprobs) == ("assistant", None)
        assert chunks[1].choices[0].delta.content.startswith(content[0].token)
    assert generation.logprobs is not None
    assert len(content) == len(generation.logprobs) == 16
    for got, (own, *top) in zip(content, generation.logprobs, strict=True):
        assert (got.token, bytes(got.bytes)) == (own.text, own.token)
        assert got.logprob == pytest.approx(own.logprob, **CLOSE)
        assert [one.token for one in got.top_logprobs] == [one.text for one in top]
        assert [one.logprob for one in got.top_logprobs] == pytest.approx([one.logprob for one in top], **CLOSE)


@pytest.mark.parametrize("stream", [False, True])
async def test_responses(daemon: Daemon, client: OpenAI, stream: bool) -> None:
    generation = await engine_says(daemon, [ChatMessage("user", TURNS[0]["content"])])
    answer = client.responses.create(
        model="tiny", input=TURNS, temperature=0, max_output_tokens=16, include=["message.output_text.logprobs"],
        top_logprobs=3, stream=stream, extra_body=IGNORE_EOS,
    )  # type: ignore[call-overload]  # fmt: skip
    if stream:
        events = list(answer)
        answer = events[-1].response
        told = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
        (whole,) = (event for event in events if event.type == "response.output_text.done")
        assert [one.to_dict() for one in told] == [one.to_dict() for one in whole.logprobs]
        assert [one.token for one in told] == [one.token for one in answer.output[0].content[0].logprobs]
    assert answer.top_logprobs == 3
    shown = answer.output[0].content[0].logprobs
    assert generation.logprobs is not None
    assert generation.text == answer.output_text
    assert len(shown) == len(generation.logprobs) == 16
    for got, (own, *top) in zip(shown, generation.logprobs, strict=True):
        assert (got.token, bytes(got.bytes)) == (own.text, own.token)
        assert got.logprob == pytest.approx(own.logprob, **CLOSE)
        assert [bytes(one.bytes) for one in got.top_logprobs] == [one.token for one in top]
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
    wanted_offsets = completion_logprobs(generation.logprobs, 0)
    assert wanted_offsets is not None
    assert [offset for one in shown for offset in one.text_offset] == wanted_offsets.text_offset


def test_none_where_nobody_asked(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=TURNS, max_tokens=2)  # type: ignore[arg-type]
    assert answer.choices[0].logprobs is None


async def engine_says_of_prompt(daemon: Daemon, prompt: str | list[ChatMessage]) -> list[tuple[TokenLogprob, ...]]:
    params = msgspec.structs.replace(PARAMS, prompt_logprobs=2)
    async with Client(daemon.address) as client:
        rows = (await client.generate(prompt, params)).prompt_logprobs
    assert rows
    return rows


def check_prompt(shown: Any, rows: list[tuple[TokenLogprob, ...]]) -> None:
    assert shown[0] is None
    for got, wanted in zip(shown[1:], rows, strict=True):
        assert set(got) == {str(one.token_id) for one in wanted}
        for one in wanted:
            entry = got[str(one.token_id)]
            assert (entry["rank"], entry["decoded_token"]) == (one.rank, one.text)
            assert entry["logprob"] == pytest.approx(one.logprob, **CLOSE)


async def test_of_the_prompt(daemon: Daemon, client: OpenAI) -> None:
    wanted: Any = {"model": "tiny", "max_tokens": 2, "n": 2, "extra_body": {"prompt_logprobs": 2}}
    chat = client.chat.completions.create(messages=TURNS, **wanted)
    assert chat.model_extra is not None
    check_prompt(
        chat.model_extra["prompt_logprobs"],
        await engine_says_of_prompt(daemon, [ChatMessage("user", TURNS[0]["content"])]),
    )
    prompts = ["the cat sat", "naïve"]
    completion = client.completions.create(prompt=prompts, **wanted)
    for choice in completion.choices:
        assert choice.model_extra is not None
        rows = await engine_says_of_prompt(daemon, prompts[choice.index // 2])
        check_prompt(choice.model_extra["prompt_logprobs"], rows)
    with pytest.raises(BadRequestError, match="prompt_logprobs came with stream"):
        client.completions.create(prompt="x", stream=True, **wanted)


@pytest.mark.parametrize("max_tokens", [0, 5])
async def test_echo(daemon: Daemon, client: OpenAI, max_tokens: int) -> None:
    prompt = "🙂 the cat sat on the 梅 mat"  # of characters that are several tokens, too
    encoded = tokenizer()(prompt, return_offsets_mapping=True)
    ids = encoded.input_ids
    rows = await engine_says_of_prompt(daemon, prompt)
    async with Client(daemon.address) as own:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
        answer = await own.generate(prompt, params)
    for asked in (prompt, ids):
        said = client.completions.create(
            model="tiny", prompt=asked, echo=True, logprobs=2, max_tokens=max_tokens, temperature=0,
            extra_body={**IGNORE_EOS, "prompt_logprobs": 1},
        )  # fmt: skip
        (choice,) = said.choices
        assert choice.text == prompt + (answer.text if max_tokens else "")
        assert choice.finish_reason == "length"
        assert said.usage is not None
        assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (len(ids), max_tokens)
        shown = choice.logprobs
        assert shown is not None
        assert shown.tokens is not None
        assert shown.text_offset is not None
        assert len(shown.tokens) == len(ids) + max_tokens
        assert shown.text_offset[: len(ids)] == [begin for begin, _ in encoded.offset_mapping]
        assert max_tokens == 0 or shown.text_offset[len(ids)] == len(prompt)
        first, *numbers = shown.token_logprobs or []
        assert first is None
        likely = [row[0].logprob for row in [*rows, *(answer.logprobs or ())][: len(numbers)]]
        assert numbers == pytest.approx(likely, **CLOSE)
        assert shown.top_logprobs is not None
        assert [None if one is None else len(one) for one in shown.top_logprobs[:2]] in ([None, 2], [None, 3])
        assert choice.model_extra is not None
        assert all(len(one) <= 2 for one in choice.model_extra["prompt_logprobs"][1:])
    several = client.completions.create(
        model="tiny", prompt=[prompt, ids], echo=True, logprobs=2, max_tokens=max_tokens or 1, temperature=0, n=3,
        extra_body={**IGNORE_EOS, "prompt_logprobs": 1},
    )  # fmt: skip
    assert len(several.choices) == 6
    whole = several.choices[0].logprobs
    assert whole is not None
    for choice in several.choices:
        shown = choice.logprobs
        assert shown is not None
        assert (choice.text, shown.tokens, shown.text_offset) == (
            several.choices[0].text,
            whole.tokens,
            whole.text_offset,
        )
        assert shown.token_logprobs is not None
        assert shown.token_logprobs[1:] == pytest.approx((whole.token_logprobs or [])[1:], **CLOSE)
        assert len(shown.top_logprobs or ()) == len(shown.tokens or ()) == len(ids) + (max_tokens or 1)
        assert choice.model_extra is not None
        assert len(choice.model_extra["prompt_logprobs"]) == len(ids)
    plain = client.completions.create(model="tiny", prompt=[prompt, ids], echo=True, max_tokens=5, temperature=0,
                                      extra_body=IGNORE_EOS)  # type: ignore[arg-type]  # fmt: skip
    assert [choice.text for choice in plain.choices] == [prompt + answer.text] * 2
    assert plain.choices[0].logprobs is None
    with pytest.raises(BadRequestError, match="prompt is token id 1000000"):
        client.completions.create(model="tiny", prompt=[10**6], echo=True)
    with pytest.raises(BadRequestError, match="echo came with stream"):
        client.completions.create(model="tiny", prompt="x", echo=True, stream=True)
    with pytest.raises(BadRequestError, match="max_tokens"):
        client.completions.create(model="tiny", prompt="x", max_tokens=0)
