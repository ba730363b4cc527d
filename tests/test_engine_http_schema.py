"""/openapi.json is true: what it allows and what it does not ends in no 5xx but the 504 of a body's own timeouts, and
every answer is as it says."""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from checkpoints import checkpoint
from daemon import Daemon, free_port
from schema_strategy import allowed, spoiled

POSTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    "/v1/completions": {"model": "tiny", "prompt": "a", "max_tokens": 3},
    "/v1/responses": {"model": "tiny", "input": [{"role": "user", "content": "a"}], "max_output_tokens": 3},
    "/v1/embeddings": {"model": "tiny", "input": ["a", "b"]},
    "/v1/rerank": {"model": "tiny", "query": "a", "documents": ["b", {"text": "c"}]},
    "/v1/score": {"model": "tiny", "text_1": "a", "text_2": ["b", "c"]},
    "/classify": {"model": "tiny", "input": ["a", "b"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
}
"""Each with a body that is surely right."""
OTHER_NAMES = {"/v2/rerank": "/v1/rerank", "/rerank": "/v1/rerank", "/score": "/v1/score"}
CHANGES = {
    "/sleep": {"level": 1, "mode": "keep"},
    "/wake_up": {},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/any"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/update_weights": {"model": "/any"},
    "/update_weights_from_disk": {"model_path": "/any"},
}
"""Of the engine, which takes none."""
FUZZ = settings(
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    flags = ["--device", "cpu", "--kv-cache-memory", "8MiB", "--served-model-name", "tiny", "--max-model-len", "96"]
    address = f"127.0.0.1:{free_port()}"
    with (
        Daemon(str(checkpoint("llama")), *flags, "--http", address, "--no-log-requests") as daemon,
        httpx.Client(base_url=daemon.http, timeout=60) as client,
    ):
        yield client
        assert client.get("/health/ready").status_code == 200
        metrics = client.get("/metrics").text
        assert '",engine="0"} 0\n' in metrics[metrics.index("tercet:num_requests_running{") :][:80]


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> dict[str, Any]:
    document: dict[str, Any] = http.get("/openapi.json").json()
    return document


def check(document: dict[str, Any], method: str, path: str, answer: httpx.Response) -> None:
    """The status is one that the document names, and the body has the shape that it gives."""
    said = f"{answer.status_code} {answer.text[:500]}"
    assert answer.status_code < 500 or timed_out(answer), said
    described = document["paths"][path][method]["responses"]
    assert str(answer.status_code) in described, said
    content = described[str(answer.status_code)]["content"]
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind in content, said
    schema = {**content[kind]["schema"], "components": document["components"]}
    if kind == "application/json":
        Draft202012Validator(schema).validate(answer.json())
    elif kind == "text/event-stream":
        *events, rest = answer.text.split("\n\n")
        assert rest == ""
        if path not in ("/v1/messages", "/v1/responses"):
            assert events.pop() == "data: [DONE]"
        for event in events:
            Draft202012Validator(schema).validate(json.loads(event[event.index("data: ") + 6 :]))


def timed_out(answer: httpx.Response) -> bool:
    """504, and a timeout that the body had itself has passed."""
    if answer.status_code != 504:
        return False
    body = json.loads(answer.request.content)
    given = [body.get(name) for name in ("timeout", "queue_timeout")]
    return min(limit for limit in given if limit is not None) <= answer.elapsed.total_seconds()


def test_the_document_is_valid(document: dict[str, Any], http: httpx.Client) -> None:
    validate(document)
    for path, operations in document["paths"].items():
        if "get" in operations:
            check(document, "get", path, http.get(path.replace("{model}", "tiny")))
            assert http.post(path).status_code == 405
    posts = {path: operations["post"] for path, operations in document["paths"].items() if "post" in operations}
    assert posts.keys() == POSTS.keys() | OTHER_NAMES.keys() | CHANGES.keys()
    for path, body in CHANGES.items():
        answer = http.post(path, json=body)
        assert answer.status_code == 403
        check(document, "post", path, answer)
    for path, known in OTHER_NAMES.items():
        assert {**posts[path], "operationId": posts[known]["operationId"]} == posts[known]
        check(document, "post", path, http.post(path, json=POSTS[known]))


@pytest.mark.parametrize("path", POSTS)
def test_bodies_as_the_document_allows_them_and_others(path: str, document: dict[str, Any], http: httpx.Client) -> None:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    good = allowed(schema, document["components"]["schemas"])
    statuses: set[int] = set()

    @FUZZ
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        body = data.draw(good | spoiled(good))
        if isinstance(body, dict) and data.draw(st.integers(0, 3)):
            body["model"] = "tiny"
            body.setdefault("max_tokens", 3) if "completions" in path or path == "/v1/messages" else None
        answer = http.post(path, content=json.dumps(body))
        statuses.add(answer.status_code)
        check(document, "post", path, answer)

    fuzz()
    assert 400 in statuses
    for body in (POSTS[path], POSTS[path] | {"stream": True}):
        if "stream" not in body or "stream" in schema_of(document, schema)["properties"]:
            answer = http.post(path, json=body)
            assert answer.status_code == (200 if path != "/classify" else 400), answer.text  # there is no such head
            check(document, "post", path, answer)


def schema_of(document: dict[str, Any], schema: dict[str, Any]) -> Any:
    """What a reference leads to."""
    return document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
def test_a_timeout_that_nothing_can_keep(path: str, document: dict[str, Any], http: httpx.Client) -> None:
    answer = http.post(path, json=POSTS[path] | {"timeout": 1e-6})
    assert answer.status_code == 504, answer.text
    check(document, "post", path, answer)


@settings(FUZZ, max_examples=40)
@given(name=st.text(min_size=1, max_size=20))
@example(name=".")
@example(name="..")
def test_names_of_models(name: str, document: dict[str, Any], http: httpx.Client) -> None:
    quoted = quote(name, safe="").replace(".", "%2E")  # a client resolves dots that it sees
    check(document, "get", "/v1/models/{model}", http.get("/v1/models/" + quoted))
