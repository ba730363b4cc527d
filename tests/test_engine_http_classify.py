"""POST /classify, and what /v1/rerank and /v1/score make of a head of one label. The test plays the scheduler."""

import asyncio
import math
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tokenizers import Tokenizer

from http_process import http_process
from played_scheduler import ended, submitted
from tercet.ipc.answers import Classifier
from tercet.ipc.beyond import Vector
from tercet.ipc.scores import activated
from tercet.ipc.step_messages import Submit
from test_engine_http_schema import check
from tokenizer_process import USAGE, TokenizerProcess, byte_checkpoint, tokenizer_process, tokens


@dataclass
class Engine:
    """Without its scheduler."""

    process: TokenizerProcess
    url: str
    tokenizer: Tokenizer

    def text_of(self, submit: Submit) -> str:
        text: str = self.tokenizer.decode(list(memoryview(submit.prompt_ids).cast("i")))
        return text


@contextmanager
def served(folder: Path, classifier: Classifier) -> Iterator[Engine]:
    tokenizer = Tokenizer.from_file(str(byte_checkpoint(folder) / "tokenizer.json"))
    with (
        tokenizer_process(folder, classifier=classifier, adapter=("sql=owner/sql",)) as process,
        http_process(process) as url,
    ):
        yield Engine(process, url, tokenizer)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with served(tmp_path_factory.mktemp("three"), Classifier(("bad", "so-so", "good"), "softmax")) as engine:
        yield engine


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with served(tmp_path_factory.mktemp("one"), Classifier(("fits",), "sigmoid")) as engine:
        yield engine


async def asked(
    engine: Engine, path: str, body: dict[str, Any], num_prompts: int, say: Callable[[str], list[float]]
) -> tuple[httpx.Response, list[Submit]]:
    """Its answer, and what the engine was asked for it. `say`: numbers for a prompt."""
    async with httpx.AsyncClient(base_url=engine.url, timeout=20) as client:
        asking = asyncio.ensure_future(client.post(path, json=body))
        submits = [await submitted(engine.process) for _ in range(num_prompts)]
        for submit in submits:
            vector = Vector(submit.number, array("f", say(engine.text_of(submit))).tobytes())
            step = tokens({submit.number: 5}, ended(submit))
            engine.process.send(msgspec.structs.replace(step, vectors=(vector,)))
        answer = await asking
        check((await client.get("/openapi.json")).json(), "post", path, answer)
    assert not engine.process.has_message()
    return answer, submits


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


async def test_labels(three: Engine) -> None:
    body = {"model": "tiny", "input": ["a", "bcd", three.tokenizer.encode("efgh").ids]}
    answer, submits = await asked(three, "/classify", body, 3, lambda text: [2.0, len(text), 0.5])
    assert sorted(map(three.text_of, submits)) == ["a", "bcd", "efgh"]
    assert all(submit.sampling.embedding.classify for submit in submits if submit.sampling.embedding is not None)
    said = answer.json()
    assert said["id"].startswith("classify-")
    assert (said["object"], said["model"]) == ("list", "tiny")
    tokens_in_all = 3 * USAGE.num_prompt_tokens
    assert said["usage"] == {"prompt_tokens": tokens_in_all, "total_tokens": tokens_in_all}
    for index, (item, length, label) in enumerate(zip(said["data"], (1, 3, 4), ("bad", "so-so", "so-so"), strict=True)):
        shares = [math.exp(logit) for logit in (2.0, length, 0.5)]
        assert item["probs"] == pytest.approx([share / sum(shares) for share in shares])
        assert (item["index"], item["label"], item["num_classes"]) == (index, label, 3)


async def test_logits_of_an_adapter_as_they_are(three: Engine) -> None:
    body = {"model": "sql", "input": "a", "use_activation": False, "cache_salt": "mine", "priority": 3}
    answer, (submit,) = await asked(three, "/classify", body, 1, lambda _: [-2.0, 7.0, 0.5])
    assert (submit.sampling.adapter, submit.cache_salt, submit.priority) == (0, "mine", 3)
    (only,) = answer.json()["data"]
    assert only == {"index": 0, "label": "so-so", "probs": [-2.0, 7.0, 0.5], "num_classes": 3}
    assert answer.json()["model"] == "sql"


@pytest.mark.parametrize("model", ["tiny", "sql"])
async def test_pairs_are_scored_by_a_head_of_one_label(one: Engine, model: str) -> None:
    """Equal ones once."""
    body = {"model": model, "query": "q", "documents": ["a", "bbbb", {"text": "cc"}, "a"], "top_n": 3}
    answer, submits = await asked(one, "/v1/rerank", body, 3, lambda text: [len(text) - 3.5])
    assert sorted(map(one.text_of, submits)) == ["qa", "qbbbb", "qcc"]
    assert {submit.sampling.adapter for submit in submits} == {-1 if model == "tiny" else 0}
    results = answer.json()["results"]
    assert [result["index"] for result in results] == [1, 2, 0]
    assert [result["relevance_score"] for result in results] == pytest.approx(list(map(sigmoid, (1.5, -0.5, -1.5))))
    body = {"model": model, "text_1": ["q", "rr"], "text_2": ["a", "b"]}
    answer, submits = await asked(one, "/v1/score", body, 2, lambda text: [len(text)])
    assert sorted(map(one.text_of, submits)) == ["qa", "rrb"]
    assert [score["score"] for score in answer.json()["data"]] == pytest.approx([sigmoid(2), sigmoid(3)])


async def test_several_labels_score_nothing(three: Engine) -> None:
    """There it is embeddings that are compared."""
    body = {"text_1": "a", "text_2": "b"}
    answer, submits = await asked(three, "/score", body, 2, lambda text: [0.6, 0.8] if text == "a" else [1.0, 0.0])
    assert not any(submit.sampling.embedding.classify for submit in submits if submit.sampling.embedding is not None)
    assert answer.json()["data"][0]["score"] == pytest.approx(0.6)


async def test_refusals(one: Engine) -> None:
    for path, body, param, words in (
        ("/v1/rerank", {"query": "q", "documents": ["a"], "dimensions": 4}, "dimensions", "scores texts by its head"),
        ("/v1/rerank", {"query": "q", "documents": ["a", "b" * 600]}, "documents[1]", "tokens"),
        ("/classify", {"input": "a", "dimensions": 4}, "dimensions", "unknown field `dimensions`"),
        ("/classify", {"input": ["a", [999]]}, "input[1]", "token id 999"),
        ("/classify", {"input": []}, "input", "1 to 2,048"),
        ("/classify", {"input": "a", "timeout": 0}, "timeout", "timeout is 0"),
    ):
        async with httpx.AsyncClient(base_url=one.url, timeout=20) as client:
            answer = await client.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert words in error["message"]
        while one.process.has_message():  # another input may have been submitted before, and is aborted
            one.process.next_message()


def test_a_sum_of_shares_is_one_and_nothing_overflows() -> None:
    assert activated([1000.0, -1000.0, 1000.0], "softmax") == [0.5, 0.0, 0.5]
    assert activated([1000.0, 0.0, -1000.0], "sigmoid") == [1.0, 0.5, 0.0]
    assert activated([3.0, -3.0], "none") == [3.0, -3.0]
