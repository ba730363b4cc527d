"""Embeddings are what transformers has of the same prompt, whatever the engine does meanwhile. fp32 on the CPU, real
processes."""

import asyncio
import random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from checkpoints import checkpoint, random_prompts, reference_model
from tercet.ipc.client import Client
from tercet.ipc.messages import EmbeddingParams, SamplingParams
from whole_engine import disturbances, tiny_engine

FAMILY = "qwen3"


def reference(family: str, prompts: list[list[int]]) -> list[NDArray[np.float64]]:
    """The last token's hidden state behind the final norm, not scaled."""
    model = reference_model(checkpoint(family)).model
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).last_hidden_state[0, -1].double().numpy() for prompt in prompts]


def unit(values: NDArray[np.float64]) -> NDArray[np.float64]:
    normed: NDArray[np.float64] = values / np.linalg.norm(values)
    return normed


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
    for prompt, params, hidden, embedding in zip(prompts, each, reference(FAMILY, prompts), got, strict=True):
        wanted = hidden[: params.dimensions]
        wanted = wanted if params.normalize is False else unit(wanted)
        assert embedding.values.typecode == "f"
        np.testing.assert_allclose(embedding.values, wanted, rtol=2e-4, atol=2e-5 * np.abs(wanted).max())
        assert (embedding.usage.num_prompt_tokens, embedding.usage.num_generated_tokens) == (len(prompt), 0)
    for before, now in zip(got, again, strict=False):
        np.testing.assert_allclose(now.values, before.values, rtol=1e-4, atol=1e-6)
