"""A request over HTTP names an adapter as its model: whatever API it asks, that adapter answers and is named again."""

import asyncio
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from anthropic import Anthropic
from openai import NotFoundError, OpenAI

from adapter_folders import make_adapter
from checkpoints import checkpoint
from daemon import Daemon, free_port
from played_messages import play
from played_scheduler import ended, submitted
from tercet.ipc.beyond import Vector
from tokenizer_process import TokenizerProcess, tokenizer_process, tokens

PLACES = {"tiny": -1, "sql": 0, "poems": 1, None: -1}
TURNS: Any = [{"role": "user", "content": "hi"}]
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/completions": {"prompt": "hi", "n": 2},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": TURNS, "max_tokens": 9},
}
VECTORS: dict[str, Any] = {
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["hi"]},
    "/v1/score": {"text_1": "hi", "text_2": "hi"},
}
"""One text each, whose embedding is wanted."""
UNKNOWN = "model is 'prose'; want 'tiny' or 'sql' or 'poems'"


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[TokenizerProcess]:
    with tokenizer_process(folder, adapter=("sql=owner/sql", "poems=owner/poems")) as process:
        yield process


def models_in(text: str) -> list[str]:
    return re.findall(r'"model": ?"([^"]*)"', text)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_who_answers_and_who_is_named(engine: TokenizerProcess, url: str, path: str, streams: bool) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        for model, place in PLACES.items():
            asking = asyncio.ensure_future(client.post(path, json={**BODIES[path], "model": model, "stream": streams}))
            submit = await submitted(engine)
            assert submit.sampling.adapter == place
            play(engine, submit, "yes")
            for sibling in submit.siblings:
                play(engine, msgspec.structs.replace(submit, number=sibling.number), "no")
            answer = await asking
            assert answer.status_code == 200
            assert set(models_in(answer.text)) == {model or "tiny"}
            if streams and path.endswith("completions"):
                assert len(models_in(answer.text)) == answer.text.count("data: {")


@pytest.mark.parametrize("path", VECTORS)
async def test_whose_embedding(engine: TokenizerProcess, url: str, path: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        for model, place in PLACES.items():
            asking = asyncio.ensure_future(client.post(path, json={**VECTORS[path], "model": model}))
            submit = await submitted(engine)
            assert submit.sampling.adapter == place
            step = tokens({submit.number: 5}, ended(submit))
            vectors = (Vector(submit.number, array("f", range(8)).tobytes()),)
            engine.send(msgspec.structs.replace(step, vectors=vectors))
            assert models_in((await asking).text) == [model or "tiny"]


async def test_questions_and_names_that_nobody_has(engine: TokenizerProcess, url: str) -> None:
    questions: dict[str, Any] = {
        "/tokenize": {"prompt": "hi"},
        "/detokenize": {"tokens": [5]},
        "/v1/messages/count_tokens": {"messages": TURNS},
    }
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        for path, body in questions.items():
            answers = {(await client.post(path, json={**body, "model": model})).text for model in PLACES}
            assert len(answers) == 1, "an adapter has no tokens of its own"
        for path, body in {**BODIES, **questions, **VECTORS}.items():
            answer = await client.post(path, json={**body, "model": "prose"})
            assert (answer.status_code, answer.json()["error"]["message"]) == (404, UNKNOWN)
        answer = await client.post("/v1/completions", json={"prompt": "hi", "adapter": "sql"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "adapter")
    assert not engine.has_message()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Without a model: it says other ids for each adapter."""
    folder, base = tmp_path_factory.mktemp("adapters"), checkpoint("llama")
    adapters = [f"--adapter={name}={make_adapter(folder / name, base, 0)}" for name in ("sql", "poems")]
    null = ["--load-format", "null", "--served-model-name", "tiny", *adapters]
    with Daemon(str(base), *null, "--http", f"127.0.0.1:{free_port()}") as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{daemon.http}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_the_list_of_models(client: OpenAI) -> None:
    base, *adapters = client.models.list().data
    assert base.id == "tiny"
    assert base.model_extra is not None
    assert base.model_extra["root"] == str(checkpoint("llama"))
    assert "parent" not in base.model_extra
    assert [one.id for one in adapters] == ["sql", "poems"]
    for one in adapters:
        assert one.model_extra == {**base.model_extra, "root": "tiny", "parent": "tiny"}
        assert client.models.retrieve(one.id) == one
    with pytest.raises(NotFoundError, match=UNKNOWN):
        client.models.retrieve("prose")


def test_openai_s_client_and_anthropic_s(daemon: Daemon, client: OpenAI) -> None:
    """One prompt: what is cached of it is each adapter's own."""
    prompt = list(range(200))
    for model, place in PLACES.items():
        if model is None:
            continue
        asked: Any = {"model": model, "prompt": prompt, "max_tokens": 4, "extra_body": {"return_token_ids": True}}
        answers = [client.completions.create(**asked) for _ in range(2)]
        assert [answer.model for answer in answers] == [model] * 2
        assert [answer.usage.prompt_tokens_details.cached_tokens for answer in answers] == [0, 192]  # type: ignore[union-attr]
        first = 1000 + 200 + 100 * (1 + place)
        assert answers[0].choices[0].model_extra["token_ids"] == list(range(first, first + 4))  # type: ignore[index]
        chunks = client.chat.completions.create(model=model, messages=TURNS, max_tokens=4, stream=True)
        assert {chunk.model for chunk in chunks} == {model}
        assert client.responses.create(model=model, input="hi", max_output_tokens=4).model == model
        values = client.embeddings.create(model=model, input=prompt, encoding_format="float")
        assert (values.model, values.data[0].embedding[0]) == (model, 200 + 100 * (1 + place))
        with Anthropic(base_url=daemon.http, api_key="none", max_retries=0, timeout=30) as other:
            assert other.messages.create(model=model, messages=TURNS, max_tokens=4).model == model
