"""Every rule of a request: what is refused, with which words, and what an accepted one becomes."""

import math
from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tercet.engine.config import EngineConfig
from tercet.engine.embedding import check_made
from tercet.engine.generation_defaults import GenerationDefaults
from tercet.engine.planner import Planner
from tercet.engine.pooling import Pooling
from tercet.engine.preparation import prepare
from tercet.engine.refusal import Refusal
from tercet.engine.request_check import (
    Rules,
    check_defaults,
    check_handling,
    check_params,
    check_prompt_ids,
    check_text_length,
    resolve,
    unpack_ids,
)
from tercet.engine.rules import make_rules
from tercet.ipc.messages import EmbeddingParams, EmbedIds, Generate, SamplingParams, Structured
from tercet.ipc.process_messages import Limits, LoadedAdapter
from tercet.ipc.step_messages import Sampling
from test_engine_planner import settings, submit

RULES = Rules(
    limits=Limits(100, 64, 1000, "float32", "cpu", 8),
    defaults=GenerationDefaults(),
    eos_ids=(2, 7),
    seed=0,
    longest_token=10,
    takes_text=True,
    page_size=1,
    pooling=Pooling(),
    adapters={},
)
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", -0.1, ["temperature", "-0.1", "0 to 1000"]),
        ("temperature", NAN, ["temperature", "nan"]),
        ("temperature", INF, ["temperature", "inf"]),
        ("temperature", -1e-9, ["temperature", "-1e-09"]),
        ("top_p", 0.0, ["top_p", "0.0", "more than 0"]),
        ("top_p", 1.01, ["top_p", "1.01"]),
        ("top_p", NAN, ["top_p", "nan"]),
        ("top_k", -2, ["top_k", "-2"]),
        ("min_p", -0.5, ["min_p", "-0.5", "0 to 1"]),
        ("min_p", 1.5, ["min_p", "1.5"]),
        ("min_p", NAN, ["min_p", "nan"]),
        ("seed", -1, ["seed", "-1", str(2**63 - 1)]),
        ("seed", 2**63, ["seed", str(2**63)]),
        ("max_tokens", 0, ["max_tokens", "0", "at least 1"]),
        ("max_tokens", -5, ["max_tokens", "-5"]),
        ("min_tokens", -1, ["min_tokens", "-1"]),
        ("stop", "", ["stop", "0 characters"]),
        ("stop", ("a", ""), ["stop", "0 characters"]),
        ("stop", "x" * 1025, ["stop", "1025"]),
        ("stop", tuple("abcdefghijklmnopq"), ["stop", "17 strings", "16"]),
        ("stop_token_ids", (1000,), ["stop_token_ids", "1000", "999"]),
        ("stop_token_ids", (-1,), ["stop_token_ids", "-1"]),
        ("stop_token_ids", tuple(range(10, 17)), ["stop_token_ids", "9 ids", "2 end-of-sequence", "at most 8"]),
        ("stop_token_ids", (1000,) * 9, ["stop_token_ids is 9 ids", "at most 8"]),
        ("repetition_penalty", 0.0, ["repetition_penalty", "0.0", "0.001 to 1000"]),
        ("repetition_penalty", NAN, ["repetition_penalty", "nan"]),
        ("presence_penalty", 2.1, ["presence_penalty", "2.1", "-2.0 to 2.0"]),
        ("presence_penalty", NAN, ["presence_penalty", "nan"]),
        ("frequency_penalty", -2.1, ["frequency_penalty", "-2.1"]),
        ("frequency_penalty", INF, ["frequency_penalty", "inf"]),
        ("logit_bias", {1000: 1.0}, ["logit_bias", "1000", "999"]),
        ("logit_bias", {-1: 1.0}, ["logit_bias", "-1"]),
        ("logit_bias", {5: 100.5}, ["logit_bias of token 5", "100.5"]),
        ("logit_bias", {5: NAN}, ["logit_bias of token 5", "nan"]),
        ("logit_bias", dict.fromkeys(range(1025), 1.0), ["logit_bias", "1025 tokens", "at most 1024"]),
        ("n", 257, ["n is 257", "1 to 256"]),
        ("n", 0, ["n is 0", "1 to 256"]),
        ("logprobs", -1, ["logprobs", "-1", "0 to 20"]),
        ("prompt_logprobs", 21, ["prompt_logprobs", "21", "0 to 20"]),
        ("spaces_between_special_tokens", False, ["spaces_between_special_tokens", "False"]),
        ("adapter", "sql", ["adapter is 'sql'; want nothing", "has no adapters"]),
        ("adapter", "", ["adapter is ''; want nothing"]),
    ],
)
def test_refused_parameters_name_field_value_and_what_is_wanted(field: str, value: Any, words: list[str]) -> None:
    with pytest.raises(Refusal) as refusal:
        check_params(SamplingParams(**{field: value}), RULES)
    for word in words:
        assert word in str(refusal.value)
    assert refusal.value.code == ("not_supported" if "not supported yet" in str(refusal.value) else "invalid_request")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0, top_p=1, top_k=0, min_p=0, seed=0),
        SamplingParams(temperature=1000, top_p=1e-9, top_k=10**12, min_p=1, seed=2**63 - 1),
        SamplingParams(top_k=-1, stop=tuple("abcdefghijklmnop"), max_tokens=1),
        SamplingParams(stop="x" * 1024, stop_token_ids=tuple(range(10, 16))),
        SamplingParams(stop_token_ids=tuple(range(10, 18)), ignore_eos=True),
        SamplingParams(stop_token_ids=(2, 7, 2, 7, 2, 7, 2, 7)),
        SamplingParams(repetition_penalty=1, logit_bias={}, n=256),
        SamplingParams(repetition_penalty=1000, presence_penalty=-2, frequency_penalty=2),
        SamplingParams(logit_bias=dict.fromkeys(range(1000), -100.0)),
    ],
)
def test_accepted_parameters(params: SamplingParams) -> None:
    check_params(params, RULES)


def test_every_parameter_is_either_honoured_or_refused() -> None:
    """A field that neither changes what the scheduler gets, nor the text, nor is refused, would be ignored."""
    other: dict[str, Any] = {
        "structured": Structured(regex="a+"),
        "max_tokens": 3, "min_tokens": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.5, "seed": 9,
        "stop_token_ids": (9,), "ignore_eos": True, "repetition_penalty": 1.1, "presence_penalty": 0.5,
        "frequency_penalty": 0.5, "logit_bias": {1: 2.0}, "logprobs": 0, "prompt_logprobs": 0,
    }  # fmt: skip
    for_the_text = {"detokenize", "stop", "include_stop_str_in_output", "skip_special_tokens", "n"}
    for_the_prompt = {"truncate_prompt_tokens"}
    plain = resolve(SamplingParams(), 4, 1, RULES)
    for field in msgspec.structs.fields(SamplingParams):
        if field.name in for_the_text | for_the_prompt:
            continue  # tests of the detokenizer, the front desk and truncation
        if field.name in other:
            assert resolve(SamplingParams(**{field.name: other[field.name]}), 4, 1, RULES) != plain, field.name
        else:
            value: dict[str, Any] = {"spaces_between_special_tokens": False, "adapter": "sql"}
            with pytest.raises(Refusal, match=field.name):
                check_params(SamplingParams(**{field.name: value.get(field.name, 5)}), RULES)


def test_an_adapter_is_named_and_becomes_its_place() -> None:
    """For embeddings as for answers."""
    rules = replace(RULES, adapters={"sql": LoadedAdapter("sql", 0, 0), "poems": LoadedAdapter("poems", 1, 5)})
    assert [resolve(SamplingParams(adapter=name), 4, 1, rules).adapter for name in (None, "sql", "poems")] == [-1, 0, 1]
    embed = EmbedIds("x", b"", EmbeddingParams(adapter="poems"))
    sampling = prepare(embed, [5], 1, None, rules).sampling
    assert (sampling.adapter, sampling.adapter_load) == (1, 5)
    for check in (
        lambda: check_params(SamplingParams(adapter="prose"), rules),
        lambda: check_made(EmbedIds("x", b"", EmbeddingParams(adapter="prose")), rules),
    ):
        with pytest.raises(Refusal, match="adapter is 'prose'; want one of 'sql', 'poems', or nothing") as refusal:
            check()
        assert refusal.value.code == "invalid_request"


def ids(packed: bytes) -> list[int]:
    return list(memoryview(packed).cast("i"))


def test_what_is_not_said_is_filled_in() -> None:
    sampling = resolve(SamplingParams(), 4, 1, RULES)
    stop_ids = array("i", [2, 7]).tobytes()
    assert sampling == Sampling(1.0, 0, 1.0, 0.0, sampling.seed, 60, 0, stop_ids, open_ended=True)
    assert not resolve(SamplingParams(max_tokens=60), 4, 1, RULES).open_ended
    assert 0 <= sampling.seed < 2**63


def test_the_checkpoint_s_defaults_and_who_wins() -> None:
    defaults = GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, max_new_tokens=10)
    rules = replace(RULES, defaults=defaults)
    given = resolve(SamplingParams(), 4, 1, rules)
    assert (given.temperature, given.top_p, given.top_k, given.min_p, given.max_tokens) == (0.6, 0.9, 20, 0.1, 10)
    params = SamplingParams(temperature=0, top_p=1, top_k=0, min_p=0, max_tokens=11)
    own = resolve(params, 4, 1, rules)
    assert (own.temperature, own.top_p, own.top_k, own.min_p, own.max_tokens) == (0, 1, 0, 0, 11)
    assert resolve(SamplingParams(), 60, 1, rules).max_tokens == 4  # the context holds no more


def test_what_ends_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    codec: Any = SimpleNamespace(
        pair_template=None,
        eos_ids=(5, 9000),
        defaults=GenerationDefaults(),
        longest_token=None,
        tokenizer=None,
        pooling=Pooling(),
    )
    assert make_rules(codec, RULES.limits, EngineConfig(model="tiny", page_size=16)).eos_ids == (5,)
    assert "eos_token_id 9000 ends nothing: the model has 1000 tokens" in capsys.readouterr().err


def test_a_temperature_too_low_to_divide_by_is_none() -> None:
    for asked, used in ((1e-8, 0), (5e-324, 0), (0.0, 0), (1e-6, 1e-6), (1e-5, 1e-5)):
        params = SamplingParams(temperature=asked)
        check_params(params, RULES)
        assert resolve(params, 4, 1, RULES).temperature == used


def test_an_answer_whose_length_nobody_says_ends_where_the_cache_does() -> None:
    """The scheduler, which counts pages, takes it, and one token more would be too many."""
    codec: Any = SimpleNamespace(
        pair_template=None,
        eos_ids=(),
        defaults=GenerationDefaults(),
        longest_token=None,
        tokenizer=None,
        pooling=Pooling(),
    )
    rules = make_rules(codec, Limits(3, 64, 1000, "float32", "cpu", 8), EngineConfig(model="tiny", page_size=16))
    planner = Planner(settings(num_pages=3, page_size=16, max_model_len=64), b"key")
    for number, length in enumerate((1, 22, 32)):
        max_tokens = resolve(SamplingParams(), length, number, rules).max_tokens
        assert planner.submit(submit(number, [1] * length, max_tokens=max_tokens), 0.0) is None
        assert planner.submit(submit(number, [1] * length, max_tokens=max_tokens + 1), 0.0) is not None
    for length in (33, 60):  # no answer fits behind it: it is the scheduler that says so
        assert resolve(SamplingParams(), length, 1, rules).max_tokens == 1
        assert planner.submit(submit(9, [1] * length, max_tokens=1), 0.0) is not None
    assert resolve(SamplingParams(max_tokens=20), 30, 1, rules).max_tokens == 20


@pytest.mark.parametrize(("top_k", "becomes"), [(-1, 0), (0, 0), (1, 1), (999, 999), (1000, 0), (2**40, 0)])
def test_top_k_of_all_tokens(top_k: int, becomes: int) -> None:
    assert resolve(SamplingParams(top_k=top_k), 4, 1, RULES).top_k == becomes


def test_stop_ids() -> None:
    assert ids(resolve(SamplingParams(stop_token_ids=(9, 7)), 4, 1, RULES).stop_ids) == [2, 7, 9]
    assert ids(resolve(SamplingParams(stop_token_ids=(9,), ignore_eos=True), 4, 1, RULES).stop_ids) == [9]
    assert ids(resolve(SamplingParams(ignore_eos=True), 4, 1, RULES).stop_ids) == []


def test_seeds() -> None:
    def seed(number: int, engine_seed: int = 0) -> int:
        return resolve(SamplingParams(), 4, number, replace(RULES, seed=engine_seed)).seed

    drawn = [seed(number) for number in range(1000)]
    assert len(set(drawn)) == 1000  # each request its own
    assert drawn == [seed(number) for number in range(1000)]  # and the same in the next run
    assert not set(drawn) & {seed(number, 1) for number in range(1000)}
    assert resolve(SamplingParams(seed=0), 4, 5, RULES).seed == 0


def test_room() -> None:
    assert resolve(SamplingParams(max_tokens=4), 60, 1, RULES).max_tokens == 4
    with pytest.raises(Refusal, match=r"max_tokens is 5; want at most 4: .* length is 64, .* has 60 tokens") as refusal:
        resolve(SamplingParams(max_tokens=5), 60, 1, RULES)
    assert refusal.value.code == "too_long_for_context"
    with pytest.raises(Refusal, match=r"min_tokens is 5; want at most max_tokens \(4\)"):
        resolve(SamplingParams(min_tokens=5), 60, 1, RULES)


def test_prompts() -> None:
    check_prompt_ids([0, 999] * 31 + [5], RULES)
    with pytest.raises(Refusal, match="at least 1 token"):
        check_prompt_ids([], RULES)
    with pytest.raises(Refusal, match=r"64 tokens, and .* length is 64, .*at most 63") as refusal:
        check_prompt_ids([1] * 64, RULES)
    assert refusal.value.code == "prompt_too_long"
    for bad in (-1, 1000, 2**31 - 1, -(2**31)):
        with pytest.raises(Refusal, match=f"token id {bad}; want ids from 0 to 999"):
            check_prompt_ids([5, bad, 6], RULES)
    with pytest.raises(Refusal, match="7 bytes"):
        unpack_ids(b"1234567")
    assert list(unpack_ids(b"\1\0\0\0\xff\xff\xff\xff")) == [1, -1]


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    check_text_length("x" * 639, RULES)
    with pytest.raises(Refusal, match=r"at least 64 tokens, and .* length is 64"):
        check_text_length("x" * 640, RULES)
    with pytest.raises(Refusal, match="at least 64"):
        check_text_length("é" * 320, RULES)
    check_text_length("x" * 10**6, replace(RULES, longest_token=None))


def test_names() -> None:
    check_handling(Generate("a", "b", cache_salt="x" * 256))
    with pytest.raises(Refusal, match="cache_salt is 257 characters; want at most 256"):
        check_handling(Generate("a", "b", cache_salt="x" * 257))


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(Refusal, match="no tokenizer"):
        check_params(SamplingParams(stop="x"), replace(RULES, takes_text=False))


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_p": 2.0}, {"top_k": -5}, {"max_new_tokens": 0}])
def test_defaults_obey_the_rules_too(bad: dict[str, Any]) -> None:
    check_defaults(replace(RULES, defaults=GenerationDefaults(temperature=0.5, top_k=50, stop_strings="x")))
    with pytest.raises(Refusal, match=next(iter(bad))):
        check_defaults(replace(RULES, defaults=GenerationDefaults(**bad)))
    with pytest.raises(Refusal, match="stop is a string of 0 characters; want 1 to 1024"):
        check_defaults(replace(RULES, defaults=GenerationDefaults(stop_strings=("x", ""))))
