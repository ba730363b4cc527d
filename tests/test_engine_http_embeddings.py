"""POST /v1/embeddings of a real engine, asked by OpenAI's own client, against transformers."""

import base64
import random
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI
from transformers import AutoTokenizer

from checkpoints import checkpoint, random_prompts
from daemon import Daemon, free_port
from last_hidden import last_hidden, unit

FAMILY = "llama"
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "went", "home", "again", "when", "rain", "came", "down"]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    flags = ["--device", "cpu", "--kv-cache-memory", "16MiB", "--served-model-name", "tiny", "--max-num-seqs", "4"]
    flags += ["--max-queued-requests", "3"]
    with Daemon(str(checkpoint(FAMILY)), *flags, "--http", f"127.0.0.1:{free_port()}") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{daemon.http}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def close(got: Any, wanted: Any) -> bool:
    return np.allclose(got, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_many_texts_in_order(client: OpenAI, encoding: Any) -> None:
    """More than slots and queue hold: the rest waits its turn."""
    texts = [" ".join(random.choices(WORDS, k=random.randint(1, 30))) for _ in range(40)]
    more = {} if encoding is None else {"encoding_format": encoding}  # the client itself asks for base64 then
    answer = client.embeddings.create(model="tiny", input=texts, user="a test", **more)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint(FAMILY))
    prompts = [tokenizer.encode(text) for text in texts]
    assert (answer.object, answer.model, [one.index for one in answer.data]) == ("list", "tiny", list(range(40)))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, prompts))
    for one, hidden in zip(answer.data, last_hidden(FAMILY, prompts), strict=True):
        values: Any = one.embedding
        if encoding == "base64":
            values = np.frombuffer(base64.b64decode(values), np.float32)
        assert close(values, unit(hidden))


def test_token_ids_dimensions_and_lengths_that_stay(client: OpenAI) -> None:
    prompts = random_prompts(3, 1, 40, seed=random.randrange(2**31))
    wanted = last_hidden(FAMILY, prompts)
    (alone,) = client.embeddings.create(model="tiny", input=prompts[0]).data
    assert close(alone.embedding, unit(wanted[0]))
    cut = client.embeddings.create(model="tiny", input=prompts, dimensions=7, extra_body={"cache_salt": "mine"})
    assert all(close(one.embedding, unit(hidden[:7])) for one, hidden in zip(cut.data, wanted, strict=True))
    as_is = client.embeddings.create(model="tiny", input=prompts, extra_body={"normalize": False})
    assert all(np.allclose(one.embedding, hidden, 1e-3, 1e-4) for one, hidden in zip(as_is.data, wanted, strict=True))


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"input": []}, "input", "input is a list that cannot be read"),
        ({"input": ["a", 5]}, "input", "want a text, token ids, or 1 to 2,048 of either"),
        ({"input": ["a"] * 2049}, "input", "1 to 2,048"),
        ({"input": 5}, "input", "input"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions is 0; want"),
        ({"input": "a", "dimensions": 65}, "dimensions", "dimensions is 65; want"),
        ({"input": ["a", [1, 99_999_999]]}, "input[1]", "input[1] is token id 99999999"),
        ({"input": ["a", [3] * 600]}, "input[1]", "tokens"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
        ({"input": "a", "timeout": 0}, "timeout", "timeout is 0"),
        ({"input": "a", "stream": True}, "stream", "stream"),
        ({"input": "a", "model": "other"}, "model", "want 'tiny'"),
    ],
)
def test_refusals(client: OpenAI, daemon: Daemon, more: dict[str, Any], param: str, words: str) -> None:
    answer = httpx.post(f"{daemon.http}/v1/embeddings", json=more, timeout=30)
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400), error
    assert error["param"] == param
    assert words in error["message"]


def test_time_is_over(daemon: Daemon) -> None:
    body = {"input": ["the cat " * 200] * 200, "timeout": 0.01}
    answer = httpx.post(f"{daemon.http}/v1/embeddings", json=body, timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timed_out")


def test_they_count(daemon: Daemon, client: OpenAI) -> None:
    def tokens() -> float:
        lines = httpx.get(f"{daemon.http}/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith("tercet:prompt_tokens_total{"))

    before = tokens()
    client.embeddings.create(model="tiny", input=[[5, 6, 7], [8]])
    assert tokens() == before + 4


def test_an_engine_around_nothing(ids_only_model: Any) -> None:
    """Its vectors are made up, as its tokens are."""
    flags = ("--load-format", "null", "--http", f"127.0.0.1:{free_port()}")
    with Daemon(str(ids_only_model), *flags) as daemon:
        answer = httpx.post(f"{daemon.http}/v1/embeddings", json={"input": [[1, 2], [3]] * 300, "dimensions": 9})
    data = answer.json()["data"]
    assert len(data) == 600
    assert all(
        one["embedding"] == list(range((2, 1)[index % 2], (11, 10)[index % 2])) for index, one in enumerate(data)
    )
