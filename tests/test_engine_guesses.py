"""Engines that try tokens ahead: the same answers as without, from real processes around tiny models on the CPU."""

import re
import time
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from openai import OpenAI

from checkpoints import reference_greedy
from covering import long
from daemon import Daemon, free_port
from guess_cases import THREE, Cases, answers, ask_until_some_are_right, draws, settled
from repetitive_model import CYCLE, FAMILY, repetitive
from tercet.ipc.messages import SamplingParams
from whole_engine import bytes_of_pages, generate, tiny_engine

pytestmark = pytest.mark.usefixtures("nan_memory")

DISTURBED = {
    "alone": {},
    "deterministic": {"deterministic": True},
    "preempted": {"kv_cache_memory": bytes_of_pages(FAMILY, 12), "max_num_batched_tokens": 64, "max_num_seqs": 32},
    "ahead": {"run_ahead": 3, "max_lease": 8, "max_lease_ms": 1e6, "max_num_seqs": 4},
}


@pytest.fixture(scope="module")
def cases(nan_memory: None) -> Cases:
    """What an engine says that guesses nothing."""
    prompts, params = draws()
    with tiny_engine(repetitive()) as llm:
        said = answers(llm, prompts, params)
        for index in (5, 11):  # one ends at a token that it says
            params[index] = replace(params[index], stop_token_ids=[said[index][0][9]])
        said = answers(llm, prompts, params)
    assert {one[2] for one in said} == {"stop", "length"}
    assert all(one[3] is None or len(one[3]) == len(one[0]) for one in said)
    assert said[0][0] == reference_greedy(repetitive(), prompts[:1], len(said[0][0]))[0]
    assert max(len(set(one[0])) for one in said) > CYCLE, "always the same again"
    return prompts, params, said


@pytest.mark.parametrize("how", [long("alone"), long("deterministic"), "preempted", long("ahead")])
def test_answers_are_those_of_an_engine_that_guesses_nothing(how: str, cases: Cases) -> None:
    prompts, params, said = cases
    with tiny_engine(repetitive(), speculative_config=THREE, **DISTURBED[how]) as llm:
        ask_until_some_are_right(llm, prompts, params, said)
        for index in range(3):
            assert answers(llm, prompts[index : index + 1], params[index : index + 1]) == said[index : index + 1]
        gauges = settled(llm)
    assert 0 < gauges.num_right_guesses < gauges.num_guesses
    assert gauges.num_trials <= gauges.num_guesses <= 3 * gauges.num_trials


def test_several_ranks_keep_the_same_guesses(cases: Cases) -> None:
    prompts, params, said = cases
    with tiny_engine(repetitive(), speculative_config=THREE, tensor_parallel_size=2) as llm:
        assert answers(llm, prompts[:6], params[:6]) == said[:6]
        assert settled(llm).num_right_guesses > 0


@pytest.mark.long
@pytest.mark.parametrize("options", [{"deterministic": True}, {}, {"tensor_parallel_size": 2}])
def test_rows_of_several_tries_attend_to_latents(options: dict[str, Any]) -> None:
    model = repetitive(family="deepseek-v3")
    prompts, _ = draws()
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with tiny_engine(model, speculative_config=THREE, **options) as llm:
        assert generate(llm, prompts[:4], greedy) == reference_greedy(model, prompts[:4], 40)
        gauges = settled(llm)
    assert 0 < gauges.num_right_guesses < gauges.num_guesses


def test_text_ends_where_a_stop_string_begins() -> None:
    """Though tokens behind it came in the same step."""
    prompts, params = draws()
    longer = replace(params[0], max_tokens=150)
    with tiny_engine(repetitive(), speculative_config=THREE, max_lease=1) as llm:
        whole = answers(llm, prompts[:1], [longer])[0][1]
        for place in range(len(whole) // 2, len(whole) // 2 + 9):
            stop = whole[place : place + 40]
            ((_, text, reason, _),) = answers(llm, prompts[:1], [replace(longer, stop=stop)])
            assert (text, reason) == (whole[: whole.index(stop)], "stop")
        assert settled(llm).num_right_guesses > 5


def test_a_daemon_that_was_told_so_by_a_flag(cases: Cases) -> None:
    """Streams by HTTP, whose pieces may be several tokens, and what it counts."""
    prompts, params, said = cases
    flags = ["--device", "cpu", "--page-size", "16", "--kv-cache-memory", "32MiB", "--served-model-name", "circles"]
    flags += ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    with Daemon(str(repetitive()), *flags, "--http", f"127.0.0.1:{free_port()}") as daemon:
        with OpenAI(base_url=f"{daemon.http}/v1", api_key="none") as client:
            for index in (0, 6):
                more = {"ignore_eos": params[index].ignore_eos}
                events = client.completions.create(
                    model="circles", prompt=prompts[index], max_tokens=params[index].max_tokens, temperature=0,
                    stream=True, extra_body=more,
                )  # fmt: skip
                assert "".join(event.choices[0].text for event in events) == said[index][1]
        time.sleep(0.6)  # gauges are refreshed some times a second
        counted = re.findall(r"vllm:spec_decode_num_\w+_total{.*} (\d+)", httpx.get(f"{daemon.http}/metrics").text)
    num_drafts, num_guesses, num_right = map(int, counted)
    assert 0 < num_drafts <= num_guesses <= 3 * num_drafts
    assert 0 < num_right <= num_guesses
