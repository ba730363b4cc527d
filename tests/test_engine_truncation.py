"""Prompts cut to `truncate_prompt_tokens`: as transformers' tokenizers cut them, of texts and pairs, and what of it is
refused."""

import asyncio
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from checkpoints import checkpoint, make_checkpoint, random_prompts, reference_greedy, reference_model, tokenizer
from classifiers import classifier, reference_logits
from daemon import Daemon, free_port
from last_hidden import last_hidden, unit
from tercet.engine.refusal import Refusal
from tercet.engine.text_codec import load_codec
from tercet.engine.truncation import shortened
from tercet.ipc.client import Client, RequestRefused
from tercet.ipc.messages import ClassificationParams, EmbeddingParams, SamplingParams
from whole_engine import tiny_engine

WORDS = [
    "the",
    "cat",
    "sät",
    "on",
    "a",
    "mat",
    "and",
    "🐈‍⬛",
    "home",
    "again",
    "when",
    "рано",
    "cámé",
    "down",
    "\n",
    "  ",
]


COUNT = 60


def some_text(words: int) -> str:
    return " ".join(random.choices(WORDS, k=words))


def framed(folder: Path, **settings: Any) -> Path:
    """A checkpoint whose tokenizer writes one token ahead of a text and one behind it; between two, one."""
    model = make_checkpoint("llama", folder, **settings)
    theirs = tokenizer()
    single, pair = "<|im_start|> $A <|im_end|>", "<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1"
    tokens = [(token, theirs.convert_tokens_to_ids(token)) for token in ("<|im_start|>", "<|im_end|>")]
    theirs.backend_tokenizer.post_processor = processors.TemplateProcessing(single, pair, tokens)
    theirs.save_pretrained(model)
    return model


def test_texts_are_cut_as_by_transformers(tmp_path: Path) -> None:
    """Where a cut is not within a character: those are left out."""
    folder = framed(tmp_path)
    codec, theirs = load_codec(folder), AutoTokenizer.from_pretrained(folder)
    for _ in range(COUNT):
        first, second = some_text(random.randint(0, 5)), some_text(random.randint(0, 60))
        whole = theirs.encode(second)
        for most in (2, 3, len(whole) // 2 + 2, max(2, len(whole) - 1), len(whole), len(whole) + 5):
            got = list(shortened(second, most, codec.encode, codec.token_ends))
            wanted = theirs.encode(second, truncation=True, max_length=most)
            assert len(got) <= most
            assert got[:1] + got[-1:] == wanted[:1] + wanted[-1:]
            if "\ufffd" not in theirs.decode(wanted):
                assert theirs.decode(got) == theirs.decode(wanted)
        most = len(theirs.encode(first, second)) - random.randint(0, 30)
        if most > len(theirs.encode(first)) + 1:  # transformers leaves one token of a text at least
            got = list(shortened(second, most, partial(codec.encode_pair, first), codec.token_ends))
            wanted = theirs(first, second, truncation="only_second", max_length=most)["input_ids"]
            assert len(got) <= most
            if "\ufffd" not in theirs.decode(wanted):
                assert theirs.decode(got) == theirs.decode(wanted)


def test_more_around_a_text_than_there_may_be(tmp_path: Path) -> None:
    codec = load_codec(framed(tmp_path))
    with pytest.raises(Refusal, match="truncate_prompt_tokens is 1, and there are 2 tokens around the text; want more"):
        shortened("a text", 1, codec.encode, codec.token_ends)


def test_offline(tmp_path: Path) -> None:
    model = framed(tmp_path)
    theirs = AutoTokenizer.from_pretrained(model)
    text = " ".join(random.choices(WORDS[:2], k=200))
    ids = theirs.encode(text)
    cut = theirs.encode(text, truncation=True, max_length=20)
    (prompt,) = random_prompts(1, 90, 90, seed=random.randrange(2**31))

    async def ask(address: str) -> None:
        async with Client(address) as client:
            embedding = await client.embed(text, EmbeddingParams(truncate_prompt_tokens=20))
            of_ids = await client.embed(prompt, EmbeddingParams(truncate_prompt_tokens=20))
            whole = await client.embed(text, EmbeddingParams(truncate_prompt_tokens=-1))
            params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, truncate_prompt_tokens=7)
            answers = [await client.generate(one, params) for one in (text, prompt)]
            with pytest.raises(RequestRefused, match="truncate_prompt_tokens is 128; want 1 to 127, or -1 for all"):
                await client.embed(text, EmbeddingParams(truncate_prompt_tokens=128))
            with pytest.raises(RequestRefused, match="truncate_prompt_tokens is 0; want 1 to 127"):
                await client.generate(text, SamplingParams(truncate_prompt_tokens=0))
            with pytest.raises(RequestRefused, match=f"{len(ids)} tokens"):
                await client.embed(text)
            roomy = SamplingParams(max_tokens=30, truncate_prompt_tokens=-1)
            assert (await client.generate(text, roomy)).usage.num_prompt_tokens == 98
        for one, prompt_ids in ((embedding, cut), (of_ids, prompt[:20]), (whole, [*ids[:126], ids[-1]])):
            assert one.usage.num_prompt_tokens == len(prompt_ids)
            (hidden,) = last_hidden(reference_model(model), [prompt_ids])
            np.testing.assert_allclose(one.values, unit(hidden), rtol=1e-3, atol=1e-4)
        for answer, prompt_ids in zip(answers, (ids[-7:], prompt[-7:]), strict=True):
            assert answer.usage.num_prompt_tokens == 7
            assert [answer.token_ids] == reference_greedy(model, [prompt_ids], 5)

    assert len(ids) > 127
    with tiny_engine(model, max_model_len=128) as llm:
        asyncio.run(ask(llm.address))


def test_pairs_of_a_classifier(tmp_path: Path) -> None:
    model = classifier("qwen3", tmp_path, seed=random.randrange(2**31), num_labels=1)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    query, document = "which mat", " ".join(random.choices(WORDS[:2], k=100))
    cut = theirs(query, document, truncation="only_second", max_length=31)["input_ids"]

    async def ask(address: str) -> Any:
        async with Client(address) as client:
            params = ClassificationParams(truncate_prompt_tokens=31)
            with pytest.raises(RequestRefused, match="want more"):
                await client.classify("the cat " * 40, params, pair="a")
            return await client.classify(query, params, pair=document)

    with tiny_engine(tmp_path, max_model_len=128) as llm:
        made = asyncio.run(ask(llm.address))
    assert made.usage.num_prompt_tokens == 31
    np.testing.assert_allclose(made.logits, reference_logits(model, [cut])[0], rtol=2e-4, atol=2e-4)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    flags = ["--device", "cpu", "--kv-cache-memory", "16MiB", "--max-model-len", "64"]
    flags += ["--http", f"127.0.0.1:{free_port()}"]
    with Daemon(str(checkpoint("llama")), *flags) as daemon, httpx.Client(base_url=daemon.http, timeout=30) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["cat " * 300, "cat"]}),
        ("/v1/rerank", {"query": "cat", "documents": ["mat " * 300, "cat"]}),
        ("/v1/score", {"text_1": "cat " * 300, "text_2": "cat"}),
        ("/v1/completions", {"prompt": "cat " * 300, "max_tokens": 3}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "cat " * 300}], "max_tokens": 3}),
    ],
)
def test_over_http(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    refused = http.post(path, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    answer = http.post(path, json={**body, "truncate_prompt_tokens": 10})
    assert answer.status_code == 200, answer.text
    assert 10 <= answer.json()["usage"]["prompt_tokens"] < 20
    answer = http.post(path, json={**body, "truncate_prompt_tokens": -1})
    assert answer.status_code == 200, answer.text
    bad = http.post(path, json={**body, "truncate_prompt_tokens": 64}).json()["error"]
    assert "truncate_prompt_tokens is 64; want 1 to 63" in bad["message"]


def test_an_echo_is_whole(http: httpx.Client) -> None:
    body = {"prompt": "cat", "echo": True, "truncate_prompt_tokens": 3}
    error = http.post("/v1/completions", json=body).json()["error"]
    assert (error["message"], error["param"]) == ("echo came with truncate_prompt_tokens; want one of them", "echo")
