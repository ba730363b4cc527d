"""Scores of texts for Python programs, against what transformers has of the same texts. fp32 on the CPU, real
processes."""

import asyncio
import math
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from checkpoints import checkpoint
from classifiers import classifier, reference_logits
from last_hidden import last_hidden, unit
from tercet.ipc.client import Client, RequestRefused
from tercet.ipc.scores import in_pairs
from whole_engine import tiny_engine

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "went", "home", "again", "when", "rain", "came", "down"]


def some_texts(count: int) -> list[str]:
    return [" ".join(random.choices(WORDS, k=random.randint(1, 30))) for _ in range(count)]


def test_cosines_of_embeddings() -> None:
    encode = AutoTokenizer.from_pretrained(checkpoint("llama")).encode
    query, documents = some_texts(1)[0], some_texts(5)
    documents.append(documents[0])
    vectors = {text: unit(*last_hidden("llama", [encode(text)])) for text in (query, *documents)}
    with tiny_engine("llama", max_model_len=64) as llm:
        got = llm.score(query, documents)
        assert got == pytest.approx([float(vectors[query] @ vectors[text]) for text in documents], abs=2e-4)
        assert got[0] == got[-1]
        each = llm.score(documents[:3], documents[3:])
        wanted = [float(vectors[one] @ vectors[other]) for one, other in zip(documents, documents[3:], strict=False)]
        assert each == pytest.approx(wanted, abs=2e-4)
        assert llm.score(query, []) == []
        assert llm.score(query, "cat " * 400, truncate_prompt_tokens=8) == pytest.approx(
            llm.score(query, "cat " * 300, truncate_prompt_tokens=8), abs=1e-6
        )
        with pytest.raises(RequestRefused, match="tokens"):
            llm.score(query, [*documents, "cat " * 400])
        with pytest.raises(RequestRefused, match="adapter is 'sql'; want nothing"):
            llm.score(query, documents, adapter="sql")
        assert llm.score(query, query) == pytest.approx([1.0])  # it goes on


def test_a_head_of_one_label(tmp_path: Path) -> None:
    model = classifier("qwen3", tmp_path, seed=random.randrange(2**31), num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    (query, *documents) = some_texts(7)
    logits = reference_logits(model, [tokenizer(query, text)["input_ids"] for text in documents])

    async def ask(address: str) -> Any:
        async with Client(address) as client:
            return await client.score(query, documents, priority=1, timeout=60)

    with tiny_engine(tmp_path) as llm:
        got = asyncio.run(ask(llm.address))
    assert got == pytest.approx([1 / (1 + math.exp(-float(one[0]))) for one in logits], abs=2e-4)


def test_what_makes_no_pairs() -> None:
    assert in_pairs("a", ["b", "c"]) == [("a", "b"), ("a", "c")]
    assert in_pairs(["a", "b"], ["c", "d"]) == [("a", "c"), ("b", "d")]
    with pytest.raises(ValueError, match="got 2 texts beside 3; want one, or as many"):
        in_pairs(["a", "b"], ["c", "d", "e"])
    with pytest.raises(TypeError, match="got a int; want texts"):
        in_pairs("a", ["b", 3])  # type: ignore[list-item]
