"""What a head that classifies says is what transformers has of the same prompt. fp32 on the CPU, real processes."""

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from adapter_folders import make_adapter
from checkpoints import random_prompts
from classifiers import classifier, reference_logits
from last_hidden import last_hidden, unit
from tercet.ipc.answers import Classifier
from tercet.ipc.client import Client, RequestRefused
from tercet.ipc.messages import ClassificationParams, SamplingParams
from whole_engine import tiny_engine


async def ask_together(address: str, prompts: list[list[int]]) -> list[Any]:
    """Logits and embeddings at once."""
    async with Client(address) as client:
        assert (await client.info()).classifier == Classifier(("bad", "so-so", "good"), "softmax")
        work = [client.classify(prompt) for prompt in prompts]
        return await asyncio.gather(*work, *(client.embed(prompt) for prompt in prompts))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"max_num_batched_tokens": 7, "max_num_seqs": 5, "run_ahead": 3}),
        pytest.param("gemma2", {}, marks=pytest.mark.long),
        pytest.param("mistral", {"tensor_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param("deepseek-v3", {"tensor_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param("minicpm3", {}, marks=pytest.mark.long),
    ],
)
def test_as_transformers(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = classifier(
        family, tmp_path, seed=random.randrange(2**31), id2label=dict(enumerate(["bad", "so-so", "good"]))
    )
    prompts = random_prompts(20, 1, 90, seed=random.randrange(2**31))
    wanted = reference_logits(model, prompts)
    with tiny_engine(tmp_path, **options) as llm:
        got = asyncio.run(ask_together(llm.address, prompts))
        for prompt, logits, one in zip(prompts, wanted, got, strict=False):
            np.testing.assert_allclose(one.logits, logits, rtol=2e-4, atol=2e-4 * np.abs(logits).max())
            assert (one.usage.num_prompt_tokens, one.usage.num_generated_tokens) == (len(prompt), 0)
        again = llm.classify(prompts)  # behind cached prefixes
        for one, logits in zip(again, wanted, strict=True):
            np.testing.assert_allclose(one.logits, logits, rtol=2e-4, atol=2e-4 * np.abs(logits).max())
        for embedding, hidden in zip(got[20:], last_hidden(model, prompts), strict=True):
            np.testing.assert_allclose(embedding.values, unit(hidden), rtol=2e-4, atol=2e-5)
        assert llm.classifier == Classifier(("bad", "so-so", "good"), "softmax")
        with pytest.raises(RequestRefused, match=r"no lm_head\.weight.* it is to classify, and for embeddings"):
            llm.generate(prompts[0], SamplingParams(max_tokens=1), use_tqdm=False)
        with pytest.raises(TypeError, match=r"params has .*want ClassificationParams"):
            llm.classify("a", SamplingParams())  # type: ignore[arg-type]


def test_pairs_and_adapters(tmp_path: Path) -> None:
    """Of adapters the hidden state: the head is the model's own."""
    model = classifier(
        "llama", tmp_path / "base", seed=random.randrange(2**31), num_labels=1, max_position_embeddings=2048
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    adapter = make_adapter(tmp_path / "sql", tmp_path / "base", 1)
    first, second = "which mat", "the cat sat on the mat " * 150

    async def ask(address: str) -> list[Any]:
        async with Client(address) as client:
            with pytest.raises(ValueError, match="got a pair of token ids; want two texts"):
                await client.classify([5], pair="a")
            with pytest.raises(RequestRefused, match="adapter is 'prose'; want one of 'sql', or nothing"):
                await client.classify("a", ClassificationParams(adapter="prose"))
            adapted = client.classify(first, ClassificationParams(adapter="sql"))
            pairs = [client.classify(first, pair=text) for text in (second[:90], second)]
            return await asyncio.gather(client.classify(first), *pairs, adapted)

    with tiny_engine(tmp_path / "base", adapter=(f"sql={adapter}",)) as llm:
        *plain, adapted = asyncio.run(ask(llm.address))
    prompts = [tokenizer.encode(first), *(tokenizer(first, text)["input_ids"] for text in (second[:90], second))]
    assert len(second) > 2000
    for one, prompt, logits in zip(plain, prompts, reference_logits(model, prompts), strict=True):
        assert one.usage.num_prompt_tokens == len(prompt)
        np.testing.assert_allclose(one.logits, logits, rtol=2e-4, atol=2e-4)
    assert abs(adapted.logits[0] - plain[0].logits[0]) > 1e-3
