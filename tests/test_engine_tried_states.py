"""Real engines that try tokens ahead, of models whose layers carry states: the same answers as without."""

import signal
from functools import partial
from typing import Any

import anyio
import pytest

from checkpoints import random_prompts, reference_greedy
from covering import long
from engine_children import children
from guess_cases import THREE, Cases, answers, ask_until_some_are_right, draws, settled
from repetitive_model import QUIET, repetitive
from tercet.ipc.client import Client
from tercet.ipc.messages import SamplingParams
from whole_engine import GREEDY, bytes_of_pages, generate, greedy_cases, tiny_engine, wait_until_empty

pytestmark = pytest.mark.usefixtures("nan_memory")

FAMILY = "qwen3.5"
model = partial(repetitive, QUIET)
FEW_PAGES = bytes_of_pages(FAMILY, 12)
DISTURBED: dict[str, dict[str, Any]] = {
    "alone": {},
    "deterministic": {"deterministic": True},
    "preempted": {"kv_cache_memory": FEW_PAGES, "max_num_batched_tokens": 96, "max_num_seqs": 32, "kept_states": 2},
    "ahead": {"run_ahead": 3, "max_lease": 8, "max_lease_ms": 1e6, "max_num_seqs": 4},
    "ranks": {"tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def cases(nan_memory: None) -> Cases:
    """What an engine says that guesses nothing."""
    prompts, params = draws()
    with tiny_engine(model(FAMILY)) as llm:
        said = answers(llm, prompts, params)
    assert said[0][0] == reference_greedy(model(FAMILY), prompts[:1], len(said[0][0]))[0]
    return prompts, params, said


def test_preempted_while_tokens_are_tried() -> None:
    prompts = [prompt * 2 for prompt in random_prompts(4, 20, 36, seed=5)]
    said = reference_greedy(model(FAMILY), prompts, 60)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with tiny_engine(model(FAMILY), speculative_config=THREE, **DISTURBED["preempted"]) as llm:
        assert generate(llm, prompts, params) == said
        gauges = settled(llm)
    assert 0 < gauges.num_right_guesses < gauges.num_guesses
    assert gauges.num_preemptions > 0


@pytest.mark.long
@pytest.mark.parametrize("how", DISTURBED)
def test_answers_are_those_of_an_engine_that_guesses_nothing(how: str, cases: Cases) -> None:
    prompts, params, said = cases
    with tiny_engine(model(FAMILY), speculative_config=THREE, **DISTURBED[how]) as llm:
        ask_until_some_are_right(llm, prompts, params, said)
        for index in range(0, 9, 3):  # few at a time, so that more is tried; from states that were kept
            assert answers(llm, prompts[index : index + 3], params[index : index + 3]) == said[index : index + 3]
        gauges = settled(llm)
    assert 0 < gauges.num_right_guesses < gauges.num_guesses
    assert (gauges.num_preemptions > 0) == (how == "preempted")


@pytest.mark.parametrize("family", [long("qwen3-next"), long("qwen3.5-moe"), long("granite-h")])
def test_other_families(family: str) -> None:
    prompts, _ = draws()
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with tiny_engine(model(family), speculative_config=THREE) as llm:
        for index in range(0, 12, 4):
            said = reference_greedy(model(family), prompts[index : index + 4], 60)
            assert generate(llm, prompts[index : index + 4], params) == said
        assert settled(llm).num_right_guesses > 0


@pytest.mark.long
def test_texts_that_do_not_repeat_themselves() -> None:
    prompts, said = greedy_cases(FAMILY)
    with tiny_engine(FAMILY, speculative_config={**THREE, "disable_by_batch_size": 22}) as llm:
        assert generate(llm, prompts, GREEDY) == said
        assert generate(llm, prompts, GREEDY) == said
        wait_until_empty(llm.address)


@pytest.mark.long
@pytest.mark.parametrize("name", ["worker", "scheduler"])
def test_answers_go_on_when_states_are_lost(name: str) -> None:
    prompts = [prompt * 2 for prompt in random_prompts(3, 40, 70, seed=8)]
    wanted = reference_greedy(model(FAMILY), prompts, 90)
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    got: list[list[int]] = [[], [], []]

    async def stream(client: Client, index: int) -> None:
        async for piece in client.stream(prompts[index], params):
            got[index] += piece.token_ids

    async def all_of_them(address: str) -> None:
        async with Client(address) as client, anyio.create_task_group() as tasks:
            for index in range(3):
                tasks.start_soon(stream, client, index)
            while min(map(len, got)) < 20:
                await anyio.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            assert max(map(len, got)) < 90

    with tiny_engine(model(FAMILY), speculative_config=THREE, restart_window=0.1, max_lease=2) as llm:
        (process,) = children(llm._engine.process.pid, name)
        anyio.run(all_of_them, llm.address)
        assert got == wanted
        assert generate(llm, prompts, params) == wanted
        assert settled(llm).num_right_guesses > 0
