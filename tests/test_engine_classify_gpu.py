"""Classifiers on a GPU: transformers' logits in fp32; in bf16 near them, and the same bits in any company."""

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import random_prompts
from classifiers import classifier, reference_logits
from tercet.engine.llm import LLM
from tercet.ipc.client import Client

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = {"kv_cache_memory": 256 << 20, "max_num_seqs": 24, "max_num_batched_tokens": 512}
REAL_HEADS = {"head_dim": 128, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}


async def together(address: str, prompts: list[list[int]]) -> list[Any]:
    """Classified all at once, and a part of them embedded beside that."""
    async with Client(address) as client:
        work = [client.classify(prompt) for prompt in prompts]
        return (await asyncio.gather(*work, *(client.embed(prompt) for prompt in prompts[::3])))[: len(prompts)]


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mistral"])
@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}], ids=str)
def test_fp32_is_transformers(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    if torch.cuda.device_count() < options.get("tensor_parallel_size", 1):
        pytest.skip("needs two CUDA devices")
    model = classifier(family, tmp_path, seed=random.randrange(2**31), num_labels=random.randrange(1, 40))
    prompts = random_prompts(40, 1, 90, seed=random.randrange(2**31))
    with LLM(str(tmp_path), device="cuda", dtype="float32", **options, **SIZES) as llm:
        got = asyncio.run(together(llm.address, prompts))
    for one, logits in zip(got, reference_logits(model, prompts), strict=True):
        np.testing.assert_allclose(one.logits, logits, rtol=1e-3, atol=1e-3 * np.abs(logits).max())


def test_bf16_has_the_same_bits_in_any_company(tmp_path: Path) -> None:
    model = classifier("qwen3", tmp_path, seed=1, num_labels=5, max_position_embeddings=1024, **REAL_HEADS)
    prompts = random_prompts(60, 1, 700, seed=random.randrange(2**31))
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "deterministic": True, **SIZES}
    with LLM(str(tmp_path), enable_prefix_caching=False, **options) as llm:
        alone = [llm.classify(prompt)[0].logits for prompt in prompts]
        assert [one.logits for one in asyncio.run(together(llm.address, prompts))] == alone
    with LLM(str(tmp_path), **{**options, "max_num_batched_tokens": 2048}) as llm:
        assert [one.logits for one in llm.classify(prompts)] == alone
        assert [one.logits for one in llm.classify(prompts)] == alone  # behind cached prefixes
    for logits, wanted in zip(alone[:20], reference_logits(model, prompts[:20]), strict=True):
        assert np.corrcoef(logits, wanted)[0, 1] > 0.99
