"""Answers of a prescribed form through the HTTP door. The weights are random: the mask alone makes them valid."""

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from checkpoints import checkpoint
from daemon import Daemon, free_port

TURNS: Any = [{"role": "user", "content": "the cat sat on the mat"}]


class Point(BaseModel):
    """What the official client makes a schema of."""

    x: Annotated[int, Field(ge=-9, le=99)]
    kind: Literal["leaf", "tree"]
    on: bool


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    flags = ["--device", "cpu", "--kv-cache-memory", "8MiB", "--served-model-name", "tiny", "--no-log-requests"]
    with (
        Daemon(str(checkpoint("llama3")), *flags, "--http", f"127.0.0.1:{free_port()}") as daemon,
        OpenAI(base_url=f"{daemon.http}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def test_the_official_parse_helper(client: OpenAI) -> None:
    points = set()
    for seed in range(4):
        answer = client.chat.completions.parse(model="tiny", messages=TURNS, response_format=Point, seed=seed)
        point = answer.choices[0].message.parsed
        assert isinstance(point, Point)
        assert answer.choices[0].finish_reason == "stop"
        points.add(point.model_dump_json())
    assert len(points) > 1
    with client.chat.completions.stream(model="tiny", messages=TURNS, response_format=Point, seed=0) as stream:
        final = stream.get_final_completion().choices[0].message.parsed
    assert final is not None
    assert final.model_dump_json() in points


def test_other_forms(client: OpenAI) -> None:
    schema = {"type": "array", "items": {"enum": [1, "zwei", None]}, "minItems": 2, "maxItems": 4}
    form: Any = {"type": "json_schema", "json_schema": {"name": "list", "schema": schema}}
    said = client.chat.completions.create(model="tiny", messages=TURNS, response_format=form).choices[0].message.content
    assert said is not None
    jsonschema.validate(json.loads(said), schema)
    said = (
        client.completions.create(
            model="tiny", prompt="the", max_tokens=40, extra_body={"structured_outputs": {"json": schema}}
        )
        .choices[0]
        .text
    )
    jsonschema.validate(json.loads(said), schema)
    for form in ({"regex": "[a-c]{3}-[0-9]{2}"}, {"choice": ["ja", "nein"]}, {"grammar": 'start: "ja" | "nein"'}):
        body = {"structured_outputs": form}
        said = client.completions.create(model="tiny", prompt="the", max_tokens=40, extra_body=body).choices[0].text
        assert re.fullmatch(form.get("regex", "ja|nein"), said)
    text = {"type": "text"}
    assert client.chat.completions.create(model="tiny", messages=TURNS, max_tokens=3, response_format=text)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
            "response_format",
        ),
        (
            {"response_format": {"type": "json_object"}, "extra_body": {"structured_outputs": {"choice": ["a"]}}},
            "response_format",
        ),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "extra_body": {"min_tokens": 3}}, "min_tokens"),
    ],
)
def test_refusals(client: OpenAI, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{"model": "tiny", "messages": TURNS, **change})
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("forms", "what"), [({}, "nothing"), ({"json": {}, "regex": "a"}, "json and regex"), ({"json": None}, "nothing")]
)
def test_forms_are_named_as_they_are_asked_for(client: OpenAI, forms: dict[str, Any], what: str) -> None:
    wanted = f"structured_outputs has {what}; want one of json, json_object, regex, choice, grammar"
    with pytest.raises(openai.BadRequestError, match=wanted):
        client.completions.create(model="tiny", prompt="the", extra_body={"structured_outputs": forms})
