"""JSON schemas of many kinds: every answer of random weights that ends validates; what cannot be held is refused."""

import json
import re
from collections.abc import Iterator
from random import SystemRandom
from typing import Any

import jsonschema
import pytest
from jsonschema.validators import validator_for

from checkpoints import random_prompts
from json_schemas import HELD, REFUSED, Schema
from tercet.engine.llm import LLM
from tercet.engine.refusal import Refusal
from tercet.engine.structured_check import check_compiles
from tercet.ipc.messages import SamplingParams, Structured
from whole_engine import tiny_engine

_FORMATS = jsonschema.FormatChecker(("uuid", "ipv4", "ipv6", "email"))
_DATE = r"\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|[12]\d))"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)"


@_FORMATS.checks("date")
def _is_date(text: object) -> bool:
    """As RFC 3339's grammar has it: 29 February in any year, and the year 0."""
    return re.fullmatch(_DATE, str(text)) is not None


@_FORMATS.checks("date-time")
def _is_date_time(text: object) -> bool:
    """As RFC 3339's grammar has it, a leap second at any time included."""
    return re.fullmatch(f"{_DATE}[Tt]{_TIME}", str(text)) is not None


def check(text: str, schema: Schema) -> None:
    validator = validator_for(schema, default=jsonschema.Draft202012Validator)
    validator.check_schema(schema)
    value: Any = json.loads(text)
    validator(schema, format_checker=_FORMATS).validate(value)


@pytest.fixture(scope="module")
def engine() -> Iterator[LLM]:
    with tiny_engine("qwen3", max_num_seqs=32) as llm:
        yield llm


def test_every_answer_that_ends_validates(engine: LLM) -> None:
    draw = SystemRandom()
    schemas = [*HELD.items()] * 2
    params = [
        SamplingParams(
            temperature=draw.choice([0.7, 1.5]),
            seed=draw.randrange(2**32),
            max_tokens=150,
            structured=Structured(json_schema=schema),
        )
        for _, schema in schemas
    ]
    outputs = engine.generate(random_prompts(len(schemas), 3, 9), params, use_tqdm=False)
    ended = set()
    for (name, schema), one, output in zip(schemas, params, outputs, strict=True):
        (completion,) = output.outputs
        if completion.finish_reason == "stop":
            try:
                check(completion.text, schema)
            except (jsonschema.ValidationError, json.JSONDecodeError) as error:
                pytest.fail(f"{name}, seed {one.seed}, temperature {one.temperature}: {completion.text!r}: {error}")
            ended.add(name)
    assert len(ended) > 0.8 * len(HELD), sorted(set(HELD) - ended)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_held_is_refused(name: str) -> None:
    schema, words = REFUSED[name]
    for form in (schema, json.dumps(schema)):
        with pytest.raises(Refusal, match=re.escape(words)):
            check_compiles(Structured(json_schema=form))
