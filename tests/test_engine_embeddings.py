"""Embeddings are what transformers has of the same prompt, whatever the engine does meanwhile. fp32 on the CPU, real
processes."""

import asyncio
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import checkpoint, random_prompts
from headless import headless
from last_hidden import last_hidden, unit
from tercet.ipc.client import Client, EngineDied, RequestRefused
from tercet.ipc.messages import EmbeddingParams, SamplingParams
from whole_engine import disturbances, tiny_engine

FAMILY = "qwen3"


async def embed_beside_others(address: str, prompts: list[list[int]], each: list[EmbeddingParams]) -> list[Any]:
    """All at once, among as many requests for tokens."""
    async with Client(address) as client:
        others = [client.generate(prompt, SamplingParams(max_tokens=20, ignore_eos=True)) for prompt in prompts]
        work = [client.embed(prompt, params) for prompt, params in zip(prompts, each, strict=True)]
        return (await asyncio.gather(*work, *others))[: len(prompts)]


@pytest.mark.parametrize("options", disturbances(FAMILY))
def test_as_transformers(options: dict[str, Any]) -> None:
    prompts = random_prompts(20, 1, 90, seed=random.randrange(2**31))
    each = [
        EmbeddingParams(),
        EmbeddingParams(normalize=False),
        EmbeddingParams(dimensions=5),
        EmbeddingParams(dimensions=1, normalize=False),
    ] * 5
    with tiny_engine(FAMILY, **options) as llm:
        got = asyncio.run(embed_beside_others(llm.address, prompts, each))
        again = asyncio.run(embed_beside_others(llm.address, prompts[:4], each[:4]))  # behind cached prefixes
    for prompt, params, hidden, embedding in zip(prompts, each, last_hidden(FAMILY, prompts), got, strict=True):
        wanted = hidden[: params.dimensions]
        off = 2e-5 * np.abs(hidden).max()  # also where all that is wanted is next to nothing
        if params.normalize is not False:
            wanted, off = unit(wanted), off / np.linalg.norm(wanted)
        assert embedding.values.typecode == "f"
        np.testing.assert_allclose(embedding.values, wanted, rtol=2e-4, atol=off)
        assert (embedding.usage.num_prompt_tokens, embedding.usage.num_generated_tokens) == (len(prompt), 0)
    for before, now in zip(got, again, strict=False):
        np.testing.assert_allclose(now.values, before.values, rtol=1e-4, atol=1e-6)


def test_of_a_program() -> None:
    prompts = random_prompts(30, 1, 90, seed=random.randrange(2**31))
    with tiny_engine("granite") as llm:
        together = llm.embed(prompts)
        as_is = llm.embed(prompts, EmbeddingParams(normalize=False))  # its final norm does more than that
        text = llm.embed("the cat", EmbeddingParams(dimensions=3))
        assert len(text[0].values) == 3
        assert abs(np.linalg.norm(text[0].values) - 1) < 1e-6
        assert llm.embed([]) == []
        with pytest.raises(RequestRefused, match=r"dimensions is 65; want 1 to 64"):
            llm.embed(prompts, EmbeddingParams(dimensions=65))
        with pytest.raises(TypeError, match=r"params has .*want EmbeddingParams"):
            llm.embed(prompts, SamplingParams())  # type: ignore[arg-type]
        assert len(llm.generate(prompts[:2], SamplingParams(max_tokens=3), use_tqdm=False)) == 2
    for one, other, wanted in zip(together, as_is, last_hidden("granite", prompts), strict=True):
        np.testing.assert_allclose(one.values, unit(wanted), rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(other.values, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())


async def test_given_up_by_its_task() -> None:
    with tiny_engine(FAMILY) as llm:
        async with Client(llm.address, reconnect_timeout=0.5) as client:
            task = asyncio.ensure_future(client.embed([5] * 200))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert len((await client.embed([5] * 3, timeout=30)).values) == 64
            llm.close()
            with pytest.raises(EngineDied):
                await client.embed([5])


def test_a_checkpoint_for_embeddings(tmp_path: Path) -> None:
    """Without a head, and with sentence-transformers' word on how its vectors are made: nothing brings them to
    length one."""
    model = headless(FAMILY, tmp_path, seed=random.randrange(2**31))
    shutil.copy(checkpoint(FAMILY) / "tokenizer.json", tmp_path)
    modules = [{"type": f"sentence_transformers.models.{name}", "path": name} for name in ("Transformer", "Pooling")]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "Pooling").mkdir()
    (tmp_path / "Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    prompts = random_prompts(5, 1, 50, seed=random.randrange(2**31))
    with torch.inference_mode():
        wanted = [model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy() for prompt in prompts]
    with tiny_engine(tmp_path) as llm:
        for embedding, hidden in zip(llm.embed(prompts), wanted, strict=True):
            np.testing.assert_allclose(embedding.values, hidden, rtol=1e-3, atol=1e-4 * np.abs(hidden).max())
        (normed,) = llm.embed(prompts[0], EmbeddingParams(normalize=True))
        np.testing.assert_allclose(normed.values, unit(wanted[0]), rtol=1e-3, atol=1e-4)
        with pytest.raises(RequestRefused, match=r"no lm_head\.weight.* it is for embeddings"):
            llm.generate(prompts[0], use_tqdm=False)
    (tmp_path / "Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    with tiny_engine(tmp_path) as llm, pytest.raises(RequestRefused, match=r"the pooling mode is mean; supported"):
        llm.embed(prompts)
