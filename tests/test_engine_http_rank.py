"""POST /v1/rerank and /v1/score of a real engine, against cosines of what transformers has of the same texts."""

import random
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import AutoTokenizer

from checkpoints import checkpoint
from daemon import Daemon, free_port
from last_hidden import last_hidden, unit

FAMILY = "llama"
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "went", "home", "again", "when", "rain", "came", "down"]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    flags = ["--device", "cpu", "--kv-cache-memory", "16MiB", "--served-model-name", "tiny", "--max-num-seqs", "4"]
    flags += ["--max-queued-requests", "3", "--http", f"127.0.0.1:{free_port()}"]
    with (
        Daemon(str(checkpoint(FAMILY)), *flags) as daemon,
        httpx.Client(base_url=daemon.http, timeout=30) as client,
    ):
        yield client


def asked(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def some_texts(count: int) -> list[str]:
    return [" ".join(random.choices(WORDS, k=random.randint(1, 30))) for _ in range(count)]


def ids_of(texts: list[str]) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint(FAMILY))
    return [tokenizer.encode(text) for text in texts]


def vectors(texts: list[str], dimensions: int | None = None) -> NDArray[np.float64]:
    return np.stack([unit(hidden[:dimensions]) for hidden in last_hidden(FAMILY, ids_of(texts))])


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_best_first(http: httpx.Client, path: str) -> None:
    """More than slots and queue hold, some of them the same, as texts and as objects."""
    query, *texts = some_texts(20)
    texts += [query, texts[3]]
    documents = [random.choice((text, {"text": text})) for text in texts]
    answer = asked(http, path, model="tiny", query=query, documents=documents, user="a test")
    assert answer["id"].startswith("rerank-")
    assert answer["model"] == "tiny"
    num_tokens = sum(map(len, ids_of(list({query, *texts}))))
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    results = answer["results"]
    scores = [one["relevance_score"] for one in results]
    wanted = vectors(texts) @ vectors([query])[0]
    assert scores == sorted(scores, reverse=True)
    assert sorted(one["index"] for one in results) == list(range(21))
    assert all(one["document"] == {"text": texts[one["index"]]} for one in results)
    np.testing.assert_allclose(scores, wanted[[one["index"] for one in results]], atol=2e-5)
    same = [one["relevance_score"] for one in results if texts[one["index"]] == query]
    assert np.allclose(same, 1, rtol=0, atol=1e-6)


def test_the_best_alone_and_without_their_texts(http: httpx.Client) -> None:
    query, *texts = some_texts(9)
    everything = asked(http, "/rerank", query=query, documents=texts)["results"]
    best = asked(http, "/rerank", query=query, documents=texts, top_n=3, return_documents=False)["results"]
    without = [{"index": one["index"], "relevance_score": one["relevance_score"]} for one in everything]
    assert [one.keys() for one in best] == [without[0].keys()] * 3
    assert [one["index"] for one in best] == [one["index"] for one in without[:3]]
    for top_n in (0, 100, None):
        assert len(asked(http, "/rerank", query=query, documents=texts, top_n=top_n)["results"]) == 8
    some = {"dimensions": 7, "cache_salt": "mine", "priority": 3, "timeout": 20, "queue_timeout": 20}
    cut = asked(http, "/rerank", query=query, documents=texts, **some)["results"]
    wanted = vectors(texts, 7) @ vectors([query], 7)[0]
    np.testing.assert_allclose([one["relevance_score"] for one in cut], np.sort(wanted)[::-1], atol=2e-5)


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores(http: httpx.Client, path: str) -> None:
    first, *others = some_texts(6)
    for text_1, text_2 in ((first, others[0]), (first, others), ([first], others), (others, others[::-1])):
        answer = asked(http, path, text_1=text_1, text_2=text_2)
        assert answer["id"].startswith("score-")
        assert (answer["object"], answer["model"]) == ("list", "tiny")
        lefts, rights = ([one] if isinstance(one, str) else one for one in (text_1, text_2))
        wanted = (vectors(lefts) * vectors(rights)).sum(axis=1)
        assert [(one["index"], one["object"]) for one in answer["data"]] == [(i, "score") for i in range(len(rights))]
        np.testing.assert_allclose([one["score"] for one in answer["data"]], wanted, atol=2e-5)
        num_tokens = sum(map(len, ids_of(list({*lefts, *rights}))))
        assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


@pytest.mark.parametrize(
    ("path", "more", "param", "words"),
    [
        ("/v1/rerank", {"documents": []}, "documents", "length >= 1"),
        ("/v1/rerank", {"documents": ["a"] * 2049}, "documents", "length <= 2048"),
        ("/v1/rerank", {"documents": "a"}, "documents", "Expected `array`"),
        ("/v1/rerank", {"documents": ["a", {"text": "a", "url": "b"}]}, "documents[1].url", "unknown field `url`"),
        ("/v1/rerank", {"documents": ["a", "the " * 600]}, "documents[1]", "tokens"),
        ("/v1/rerank", {"query": "the " * 600}, "query", "tokens"),
        ("/v1/rerank", {"query": None}, "query", "Expected `str`"),
        ("/v1/rerank", {"top_n": -1}, "top_n", ">= 0"),
        ("/v1/rerank", {"dimensions": 65}, "dimensions", "dimensions is 65; want"),
        ("/v1/rerank", {"max_tokens_per_doc": 5}, "max_tokens_per_doc", "unknown field"),
        ("/v1/rerank", {"model": "other"}, "model", "want 'tiny'"),
        ("/v1/score", {"text_1": ["a", "b"]}, "text_1", "text_1 has 2 texts beside 3 of text_2; want one, or as many"),
        ("/v1/score", {"text_2": []}, "text_2", "length >= 1"),
        ("/v1/score", {"text_2": ["a", "the " * 600]}, "text_2[1]", "tokens"),
        ("/v1/score", {"text_1": "the " * 600}, "text_1", "tokens"),
        ("/v1/score", {"timeout": 0}, "timeout", "timeout is 0"),
        ("/v1/score", {"use_activation": True}, "use_activation", "unknown field"),
    ],
)
def test_refusals(http: httpx.Client, path: str, more: dict[str, Any], param: str, words: str) -> None:
    good = {"query": "a", "documents": ["b"]} if path == "/v1/rerank" else {"text_1": "a", "text_2": ["b", "c", "d"]}
    answer = http.post(path, json=good | more)
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400), error
    assert error["param"] == param
    assert words in error["message"]


def test_time_is_over(http: httpx.Client) -> None:
    body = {"query": "a", "documents": [f"{number} cats " * 90 for number in range(200)], "timeout": 0.01}
    answer = http.post("/v1/rerank", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timed_out")
