"""`n` answers to one prompt, and answers without text, by the whole engine."""

from collections.abc import Iterator

import anyio
import pytest

from checkpoints import random_prompts
from tercet.engine.llm import LLM
from tercet.ipc.client import Client, RequestRefused
from tercet.ipc.messages import SamplingParams
from tercet.ipc.several import generate_several
from whole_engine import PAGE_SIZE, generate, tiny_engine, wait_until_empty

pytestmark = pytest.mark.usefixtures("nan_memory")

PROMPTS = random_prompts(5, 40, 90, seed=61)


@pytest.fixture(scope="module")
def engine(nan_memory: None) -> Iterator[LLM]:
    with tiny_engine("llama3", max_num_seqs=8) as llm:
        yield llm


def drawn(seed: int | None, n: int = 1, **more: object) -> SamplingParams:
    return SamplingParams(temperature=1.2, seed=seed, max_tokens=20, ignore_eos=True, n=n, **more)  # type: ignore[arg-type]


def test_several_are_what_their_seeds_say(engine: LLM) -> None:
    sizes = [1, 3, 4, 2, 5]
    params = [drawn(100 * i, n, logprobs=1) for i, n in enumerate(sizes)]
    outputs = engine.generate(PROMPTS, params, use_tqdm=False)
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


async def test_the_prompt_is_computed_once(engine: LLM) -> None:
    (prompt,) = random_prompts(1, 90, 90, seed=62)
    async with Client(engine.address) as client:
        with anyio.fail_after(30):
            generations = await generate_several(client, prompt, drawn(1, 6))
    cached = [one.usage.num_cached_tokens for one in generations]
    assert cached == [0] + [(len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE] * 5


async def test_wrong_numbers(engine: LLM) -> None:
    async with Client(engine.address) as client:
        for n in (0, 65):
            with pytest.raises(ValueError, match=f"n is {n}; want 1 to 64"):
                await generate_several(client, PROMPTS[0], drawn(1, n))
        with pytest.raises(RequestRefused, match="max_tokens"):
            await generate_several(client, PROMPTS[0], SamplingParams(n=3, max_tokens=0))


def test_ids_without_text(engine: LLM) -> None:
    (with_text,) = engine.generate(PROMPTS[1], drawn(7), use_tqdm=False)
    (without,) = engine.generate(PROMPTS[1], drawn(7, detokenize=False), use_tqdm=False)
    assert with_text.outputs[0].text
    assert without.outputs[0].text == ""
    assert without.outputs[0].token_ids == with_text.outputs[0].token_ids
    with pytest.raises(RequestRefused, match="stop_token_ids beside detokenize false"):
        engine.generate(PROMPTS[1], drawn(7, detokenize=False, stop="a"), use_tqdm=False)
    wait_until_empty(engine.address)
