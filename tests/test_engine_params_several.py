"""`n` answers to one prompt by the whole engine, through every door but HTTP: what their seeds say, computed once."""

import re
from collections.abc import Iterator

import anyio
import anyio.to_thread
import pytest
from msgspec import structs

from checkpoints import random_prompts
from covering import long
from raw_client import RawClient
from tercet.engine.llm import LLM
from tercet.ipc.client import Client, RequestRefused
from tercet.ipc.messages import SamplingParams, Structured
from whole_engine import PAGE_SIZE, bytes_of_pages, generate, tiny_engine, wait_until_empty

pytestmark = pytest.mark.usefixtures("nan_memory")

PROMPTS = random_prompts(5, 40, 90, seed=61)
OTHERS = {
    "mistral": {"max_num_seqs": 3},
    # So few pages that answers are interrupted.
    "qwen3": {"deterministic": True, "kv_cache_memory": bytes_of_pages("qwen3", 18)},
    "deepseek-v3": {"kv_cache_memory": bytes_of_pages("deepseek-v3", 18)},
}


@pytest.fixture(scope="module")
def plain(nan_memory: None) -> Iterator[LLM]:
    """Prompts in chunks; nothing is found again but what answers to one prompt share."""
    with tiny_engine("llama3", enable_prefix_caching=False, max_num_seqs=16, max_num_batched_tokens=32) as llm:
        yield llm


@pytest.fixture(params=["plain", "qwen3", long("mistral"), long("deepseek-v3")])
def engine(nan_memory: None, request: pytest.FixtureRequest) -> Iterator[LLM]:
    if request.param == "plain":
        yield request.getfixturevalue("plain")
        return
    with tiny_engine(request.param, **OTHERS[request.param]) as llm:
        yield llm


def drawn(seed: int | None, n: int = 1, **more: object) -> SamplingParams:
    return SamplingParams(temperature=1.2, seed=seed, max_tokens=20, ignore_eos=True, n=n, **more)  # type: ignore[arg-type]


def test_several_are_what_their_seeds_say(engine: LLM) -> None:
    sizes = [1, 3, 4, 2, 5]
    params = [drawn(100 * i, n, logprobs=1) for i, n in enumerate(sizes)]
    outputs = engine.generate(PROMPTS, params, use_tqdm=False)
    gauges = wait_until_empty(engine.address)
    assert (gauges.num_preemptions > 0) == (gauges.num_pages < 20)
    for i, (prompt, n, output) in enumerate(zip(PROMPTS, sizes, outputs, strict=True)):
        assert [one.index for one in output.outputs] == list(range(n))
        singles = generate(engine, [prompt] * n, [drawn(100 * i + j) for j in range(n)])
        assert [one.token_ids for one in output.outputs] == singles
        assert all(one.logprobs is not None and len(one.logprobs) == 20 for one in output.outputs)
        assert output.usage.num_generated_tokens == 20 * n
        assert output.usage.num_prompt_tokens == len(prompt)
    (loose,) = engine.generate(PROMPTS[0], drawn(None, 4), use_tqdm=False)
    assert len({tuple(one.token_ids) for one in loose.outputs}) == 4
    wait_until_empty(engine.address)


async def test_the_prompt_is_computed_once(plain: LLM) -> None:
    """Without a prefix cache: all tokens but the last of five prompts out of six are there."""
    (prompt,) = random_prompts(1, 2 * PAGE_SIZE + 7, 90, seed=62)
    async with Client(plain.address) as client:
        with anyio.fail_after(30):
            generations = await client.generate_several(prompt, drawn(1, 6, prompt_logprobs=1))
    cached = [one.usage.num_cached_tokens for one in generations]
    assert cached == [0] + [len(prompt) - 1] * 5
    assert [one.prompt_logprobs is None for one in generations] == [False] + [True] * 5
    assert len(generations[0].prompt_logprobs or ()) == len(prompt) - 1


def test_what_shapes_one_answer_shapes_each(plain: LLM) -> None:
    """Grammars, penalties and biases are each answer's own."""
    form = Structured(regex="(red|green|blue)( [a-z]{2}){3,5}")
    params = SamplingParams(n=3, seed=3, max_tokens=40, structured=form, presence_penalty=1.0, logit_bias={50: 3.0})
    (output,) = plain.generate("the cat sat on the mat", params, use_tqdm=False)
    each = [structs.replace(params, n=1, seed=seed) for seed in (3, 4, 5)]
    singles = plain.generate(["the cat sat on the mat"] * 3, each, use_tqdm=False)
    texts = [one.text for one in output.outputs]
    assert texts == [single.outputs[0].text for single in singles]
    assert len(set(texts)) == 3
    assert form.regex is not None
    assert all(re.fullmatch(form.regex, text) for text in texts)


async def test_streams_of_several(plain: LLM) -> None:
    """Pieces say whose they are; leaving ends all."""
    async with Client(plain.address) as client:
        whole = await client.generate_several(PROMPTS[0], drawn(1, 3, logprobs=0))
        ids: list[list[int]] = [[], [], []]
        async for piece in client.stream(PROMPTS[0], drawn(1, 3, logprobs=0)):
            ids[piece.index] += piece.token_ids
            assert piece.logprobs is not None
            assert [row[0].token_id for row in piece.logprobs] == piece.token_ids
            if piece.generation is not None:
                assert piece.generation.token_ids == ids[piece.index] == whole[piece.index].token_ids
                assert piece.generation.logprobs == whole[piece.index].logprobs
        assert all(ids)
        endless = SamplingParams(n=8, max_tokens=400, ignore_eos=True, seed=3)
        seen = set()
        stream = client.stream(PROMPTS[1], endless)
        async for piece in stream:
            seen.add(piece.index)
            assert piece.generation is None
            if len(seen) == 8:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        await anyio.to_thread.run_sync(wait_until_empty, plain.address)


def test_a_socket_and_msgpack(plain: LLM) -> None:
    """A program with nothing of ours; another of its requests is cancelled on the way."""
    prompt = memoryview(bytearray(4 * len(PROMPTS[2]))).cast("i")
    for place, token_id in enumerate(PROMPTS[2]):
        prompt[place] = token_id
    singles = generate(plain, [PROMPTS[2]] * 3, [drawn(7 + i) for i in range(3)])
    sampling = {"temperature": 1.2, "max_tokens": 20, "ignore_eos": True, "seed": 7, "n": 3}
    with RawClient(plain.address) as raw:
        raw.ask("GenerateIds", "long", prompt.tobytes(), {**sampling, "max_tokens": 400})
        raw.ask("GenerateIds", "short", prompt.tobytes(), sampling)
        ids: dict[tuple[str, int], bytes] = {}
        reasons: dict[tuple[str, int], str] = {}
        for kind, name, _, token_ids, *fields in raw.items():
            answer = name, fields[-1]
            ids[answer] = ids.get(answer, b"") + token_ids
            if kind == "Finished":
                assert answer not in reasons
                reasons[answer] = fields[0]
                if len(reasons) == 3:
                    raw.ask("Cancel", "long")
            if len(reasons) == 6:
                break
    assert reasons == {("short", i): "length" for i in range(3)} | {("long", i): "cancelled" for i in range(3)}
    for index, single in enumerate(singles):
        assert memoryview(ids["short", index]).cast("i").tolist() == single
        assert memoryview(ids["long", index]).cast("i").tolist()[:20] == single
    wait_until_empty(plain.address)


async def test_wrong_numbers(plain: LLM) -> None:
    async with Client(plain.address) as client:
        for n in (0, 257):
            with pytest.raises(ValueError, match=f"n is {n}; want 1 to 256"):
                await client.generate_several(PROMPTS[0], drawn(1, n))
        with pytest.raises(ValueError, match="n is 2, and generate gives one answer; want generate_several, or stream"):
            await client.generate(PROMPTS[0], drawn(1, 2))
        with pytest.raises(RequestRefused, match="max_tokens"):
            await client.generate_several(PROMPTS[0], SamplingParams(n=3, max_tokens=0))


def test_ids_without_text(plain: LLM) -> None:
    (with_text,) = plain.generate(PROMPTS[1], drawn(7), use_tqdm=False)
    (without,) = plain.generate(PROMPTS[1], drawn(7, detokenize=False), use_tqdm=False)
    assert with_text.outputs[0].text
    assert without.outputs[0].text == ""
    assert without.outputs[0].token_ids == with_text.outputs[0].token_ids
    with pytest.raises(RequestRefused, match="stop_token_ids beside detokenize false"):
        plain.generate(PROMPTS[1], drawn(7, detokenize=False, stop="a"), use_tqdm=False)
    wait_until_empty(plain.address)
