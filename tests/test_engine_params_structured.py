"""Answers of a prescribed form, by the whole engine on random weights, which would say anything: each matches what was
asked, as other packages judge; each token is the likeliest that the form allows; and nobody else notices."""

import json
import re
from collections.abc import Iterator
from typing import Any

import anyio
import jsonschema
import pytest

from checkpoints import random_prompts
from covering import long
from raw_client import RawClient
from tercet.engine.llm import LLM
from tercet.ipc.client import Client, RequestRefused
from tercet.ipc.messages import SamplingParams, Structured
from tercet.ipc.prompt import pack_ids
from whole_engine import bytes_of_pages, generate, tiny_engine, wait_until_empty

pytestmark = pytest.mark.usefixtures("nan_memory")

FAMILY = "llama3"
PROMPTS = random_prompts(12, 3, 60, seed=51)
_POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 99}, "on": {"type": "boolean"}},
    "required": ["x", "on"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    _POINT,
    {"enum": ["red", "green", 3, None]},
    {"type": "array", "items": _POINT, "minItems": 2, "maxItems": 3},
    {"type": "string", "maxLength": 12},
    {"type": "array", "items": {"enum": [1, 2]}, "minItems": 4, "maxItems": 4},
    {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    {
        "type": "object",
        "properties": {
            "kind": {"const": "leaf"},
            "sizes": {"type": "array", "items": {"enum": [1]}, "maxItems": 3},
        },
        "required": ["kind", "sizes"],
        "additionalProperties": False,
    },
    {"type": "string", "pattern": "^[a-c]{3}-[0-9]{2}$"},
]
REGEXES = ["(ab|cd){2,5}", "[0-9]{4}-[0-9]{2}", "naïve? café", "[^a]{1,8}", "x"]
CHOICES = ["yes", "no", "maybe (not)", "東京"]
GRAMMAR = 'start: sum\nsum: term ("+" term)~1..3\nterm: NUMBER | "(" NUMBER ")"\nNUMBER: /[1-9][0-9]?/\n'
FORMS = [
    *(Structured(json_schema=schema if i % 2 else json.dumps(schema)) for i, schema in enumerate(SCHEMAS)),
    *(Structured(regex=regex) for regex in REGEXES),
    Structured(choice=tuple(CHOICES)),
    Structured(grammar=GRAMMAR),
]


def fits(form: Structured, text: str) -> bool:
    """As other packages see it."""
    if form.json_schema is not None:
        schema = form.json_schema if isinstance(form.json_schema, dict) else json.loads(form.json_schema)
        jsonschema.validate(json.loads(text), schema)
        return True
    if form.regex is not None:
        return re.fullmatch(form.regex, text, re.DOTALL) is not None
    if form.choice is not None:
        return text in form.choice
    return re.fullmatch(r"([1-9]\d?|\([1-9]\d?\))(\+([1-9]\d?|\([1-9]\d?\))){1,3}", text) is not None


def params_of(index: int) -> SamplingParams:
    form = FORMS[index % len(FORMS)]
    return SamplingParams(temperature=(1.5, 0.0)[index % 2], seed=index, max_tokens=120, structured=form)


@pytest.fixture(scope="module")
def engine(nan_memory: None) -> Iterator[LLM]:
    with tiny_engine(FAMILY, max_num_seqs=6) as llm:
        yield llm


def check_among_free_requests(llm: LLM) -> int:
    """How often a request was preempted."""
    free = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * len(PROMPTS)
    alone = generate(llm, PROMPTS, free)
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(2 * len(FORMS))]
    params = [params_of(i) for i in range(2 * len(FORMS))]
    outputs = llm.generate(prompts + PROMPTS, params + free, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs[len(prompts) :]] == alone
    for one, output in zip(params, outputs, strict=False):
        (completion,) = output.outputs
        assert one.structured is not None
        assert completion.finish_reason == "stop", completion
        assert fits(one.structured, completion.text), (one.structured, completion.text)
    wait_until_empty(llm.address)
    return sum(output.usage.num_preemptions for output in outputs)


def test_every_form_among_free_requests(engine: LLM) -> None:
    check_among_free_requests(engine)


@pytest.mark.parametrize(
    "options",
    [
        long({"max_num_batched_tokens": 7, "max_num_seqs": 5, "run_ahead": 3, "max_lease": 8}),
        long({"kv_cache_memory": bytes_of_pages(FAMILY, 16), "max_num_seqs": 32, "max_num_batched_tokens": 64}),
        long({"deterministic": True, "tensor_parallel_size": 2}),
    ],
    ids=["chunks", "preempted", "ranks"],
)
def test_every_form_under_disturbance(options: dict[str, Any]) -> None:
    with tiny_engine(FAMILY, **options) as llm:
        assert (check_among_free_requests(llm) > 0) == ("kv_cache_memory" in options)


def test_a_json_object(engine: LLM) -> None:
    """Random weights may never close one: what there is at least is the beginning of one."""
    params = SamplingParams(temperature=1.0, max_tokens=60, structured=Structured(json_object=True))
    for output in engine.generate(PROMPTS, params, use_tqdm=False):
        (completion,) = output.outputs
        assert completion.text.startswith("{")
        if completion.finish_reason == "stop":
            assert isinstance(json.loads(completion.text), dict)


def test_with_penalties_logprobs_and_bias(engine: LLM) -> None:
    form = Structured(regex="[ab]{30}")
    params = SamplingParams(
        temperature=0, max_tokens=60, structured=form, frequency_penalty=2.0, logit_bias={5: 50.0}, logprobs=2
    )
    (output,) = engine.generate(PROMPTS[0], params, use_tqdm=False)
    (completion,) = output.outputs
    assert re.fullmatch("[ab]{30}", completion.text)
    assert set(completion.text) == {"a", "b"}
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)


def test_through_a_socket(engine: LLM) -> None:
    with RawClient(engine.address) as client:
        for name, form in {"a": {"choice": ["left", "right"]}, "b": {"json_schema": SCHEMAS[1]}}.items():
            client.ask("GenerateIds", name, pack_ids(PROMPTS[1]), {"structured": form, "max_tokens": 30})
        answers = client.answers(2)
    assert answers["a"][0] in ("left", "right")
    assert json.loads(answers["b"][0]) in SCHEMAS[1]["enum"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"structured": Structured()}, "structured is empty; want one of json_schema"),
        ({"structured": Structured(regex="a", choice=("b",))}, "regex and choice"),
        ({"structured": Structured(regex="a(")}, "does not compile"),
        ({"structured": Structured(json_schema={"type": "foo"})}, "does not compile: Invalid type: foo"),
        ({"structured": Structured(json_schema="{")}, "does not compile"),
        ({"structured": Structured(grammar="start: nobody")}, "does not compile"),
        ({"structured": Structured(choice=())}, "choice is of 0 texts; want 1 to 1024"),
        ({"structured": Structured(regex="a" * 70_000)}, "at most 65536"),
        ({"structured": Structured(regex="a"), "ignore_eos": True}, "ignore_eos false"),
        ({"structured": Structured(regex="a"), "min_tokens": 3}, "min_tokens is 3; want 0 beside structured"),
    ],
)
async def test_refused(engine: LLM, changes: dict[str, Any], words: str) -> None:
    async with Client(engine.address) as client:
        with anyio.fail_after(20):
            with pytest.raises(RequestRefused, match=re.escape(words)):
                await client.generate(PROMPTS[0], SamplingParams(max_tokens=9, **changes))
            generation = await client.generate(PROMPTS[0], SamplingParams(max_tokens=9, ignore_eos=True))
    assert len(generation.token_ids) == 9
