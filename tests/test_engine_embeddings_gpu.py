"""Embeddings on a GPU: transformers' in fp32; in bf16 near them, and the same bits whatever else is computed."""

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import checkpoint, make_checkpoint, random_prompts, reference_model
from last_hidden import last_hidden, unit
from tercet.engine.llm import LLM
from tercet.ipc.client import Client
from tercet.ipc.messages import EmbeddingParams, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = {"kv_cache_memory": 256 << 20, "max_num_seqs": 24, "max_num_batched_tokens": 512}
REAL_HEADS = {"head_dim": 128, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}


@pytest.fixture(scope="module")
def real_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("real"), **REAL_HEADS, max_position_embeddings=1024)


async def beside_others(address: str, prompts: list[list[int]]) -> list[Any]:
    """All at once, among requests that decode, some of which tell log-probabilities."""
    async with Client(address) as client:
        params = [
            SamplingParams(max_tokens=60, ignore_eos=True, seed=seed, logprobs=(None, 2)[seed % 2])
            for seed in range(16)
        ]
        others = [client.generate(prompt, one) for prompt, one in zip(prompts, params, strict=False)]
        return (await asyncio.gather(*(client.embed(prompt) for prompt in prompts), *others))[: len(prompts)]


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"tensor_parallel_size": 2}], ids=str)
def test_fp32_is_transformers(options: dict[str, Any]) -> None:
    if torch.cuda.device_count() < options.get("tensor_parallel_size", 1):
        pytest.skip("needs two CUDA devices")
    prompts = random_prompts(60, 1, 400, seed=random.randrange(2**31))
    with LLM(str(checkpoint("llama")), device="cuda", dtype="float32", **options, **SIZES) as llm:
        got = asyncio.run(beside_others(llm.address, prompts))
        cut = llm.embed(prompts[:9], EmbeddingParams(dimensions=10, normalize=False))
    wanted = last_hidden("llama", prompts)
    for one, hidden in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one.values, unit(hidden), rtol=1e-3, atol=1e-4)
    for one, hidden in zip(cut, wanted, strict=False):
        np.testing.assert_allclose(one.values, hidden[:10], rtol=1e-3, atol=1e-3 * np.abs(hidden).max())


def test_bf16_has_the_same_bits_in_any_company(real_heads: Path) -> None:
    prompts = random_prompts(80, 1, 700, seed=random.randrange(2**31))
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "deterministic": True, **SIZES}
    with LLM(str(real_heads), enable_prefix_caching=False, **options) as llm:
        alone = [llm.embed(prompt)[0].values.tobytes() for prompt in prompts]
        together = asyncio.run(beside_others(llm.address, prompts))
    assert [one.values.tobytes() for one in together] == alone
    with LLM(str(real_heads), **{**options, "max_num_batched_tokens": 2048}) as llm:
        assert [one.values.tobytes() for one in llm.embed(prompts)] == alone
        assert [one.values.tobytes() for one in llm.embed(prompts)] == alone  # behind cached prefixes
    model = reference_model(real_heads).model
    for prompt, values in zip(prompts[:20], alone, strict=False):
        with torch.inference_mode():
            hidden = model(torch.tensor([prompt])).last_hidden_state[0, -1].double().numpy()
        assert float(np.frombuffer(values, np.float32) @ unit(hidden)) > 0.995
