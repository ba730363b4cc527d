"""Whole engines of models whose layers carry states, with pages and states in the host's memory: chats that others
drove out come back and go on from where they were, and say what they would have.
"""

import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from checkpoints import checkpoint, random_prompts, reference_greedy
from covering import long
from engine_children import children
from tercet.engine.llm import LLM
from tercet.ipc.client import Client
from tercet.ipc.messages import SamplingParams
from test_engine_offloading import other_weights, wait_until_stored
from whole_engine import bytes_of_pages, generate, info, tiny_engine, wait_until_empty

pytestmark = pytest.mark.usefixtures("nan_memory")
FAMILY = "qwen3.5"
NUM_TOKENS = 12
HOST_BYTES = 32 << 20
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
TILE = 64
"""A page and a tile end at its multiples."""


def known(prompt: list[int]) -> int:
    """How much of a prompt that was there before need not be computed again."""
    return (len(prompt) - 1) // TILE * TILE


def small_engine(family: str = FAMILY, **options: Any) -> LLM:
    """Its cache is full with two or three chats, and there are places for the states of two."""
    cache = {"kv_cache_memory": bytes_of_pages(family, 30), "kv_offloading_size": HOST_BYTES, "kept_states": 2}
    return tiny_engine(family, **{**cache, "max_num_seqs": 4, **options})


@pytest.fixture(scope="module")
def llm(nan_memory: None) -> Iterator[LLM]:
    with small_engine(max_restarts=100, restart_window=0.1) as llm:
        yield llm


@functools.cache
def cases(family: str = FAMILY) -> tuple[list[list[int]], list[list[int]]]:
    """Four chats, and what transformers says to them."""
    prompts = random_prompts(4, 130, 220, seed=5)
    assert min(map(known, prompts)) >= 2 * TILE
    return prompts, [reference_greedy(checkpoint(family), [prompt], NUM_TOKENS)[0] for prompt in prompts]


def ask(llm: LLM, prompt: list[int]) -> tuple[list[int], int]:
    """What it says, and how much of the prompt it did not compute."""
    (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    return output.outputs[0].token_ids, output.usage.num_cached_tokens


def ask_all(llm: LLM, family: str = FAMILY) -> None:
    """Each, alone, says what transformers does. Then all that is full is stored, and all states that are kept."""
    for prompt, answer in zip(*cases(family), strict=True):
        assert ask(llm, prompt)[0] == answer
    wait_until_stored(llm)


def come_back(llm: LLM, family: str = FAMILY) -> None:
    """Each from where it was, whatever the others have driven out."""
    prompts, answers = cases(family)
    before = info(llm.address)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert ask(llm, prompt) == (answer, known(prompt))
    now = wait_until_stored(llm)
    hits = now.num_prefix_hits - before.num_prefix_hits
    assert now.num_host_hits - before.num_host_hits == hits == sum(map(known, prompts))
    assert now.num_stored_bytes == before.num_stored_bytes  # nothing twice
    assert now.num_loaded_bytes - before.num_loaded_bytes >= len(prompts) * llm._engine.limits.state_bytes


def test_what_left_comes_back_with_its_state(llm: LLM) -> None:
    ask_all(llm)
    come_back(llm)
    limits = llm._engine.limits
    assert limits.page_bytes == bytes_of_pages(FAMILY, 1)
    room = limits.num_host_pages * limits.page_bytes + limits.num_host_states * limits.state_bytes
    assert HOST_BYTES - limits.page_bytes < room <= HOST_BYTES
    prompt, answer = (some[0] for some in cases())
    turn = prompt + answer + prompt[:30]
    assert ask(llm, turn) == (reference_greedy(checkpoint(FAMILY), [turn], NUM_TOKENS)[0], known(prompt))


def test_all_at_once_and_beside_requests_that_leave(llm: LLM) -> None:
    """Some cancel at once, which may be while their pages and states are on their way."""
    prompts, answers = cases()
    ask_all(llm)
    before = info(llm.address).num_host_hits

    async def hurry(client: Client, prompt: list[int]) -> None:
        for milliseconds in range(6):
            with anyio.move_on_after(milliseconds / 1e3):
                await client.generate(prompt, GREEDY)

    async def ask_at_once() -> None:
        async with Client(llm.address) as client, anyio.create_task_group() as tasks:
            for prompt in random.Random(1).sample(prompts, len(prompts)):
                tasks.start_soon(hurry, client, prompt)

    anyio.run(ask_at_once)
    assert generate(llm, prompts, GREEDY) == answers
    wait_until_empty(llm.address)
    assert wait_until_stored(llm).num_host_hits > before


def test_new_workers_begin_with_nothing(llm: LLM) -> None:
    prompts, answers = cases()
    (worker,) = children(llm._engine.process.pid, "worker")
    worker.kill()
    assert ask(llm, prompts[0])[0] == answers[0]
    assert [ask(llm, prompt) for prompt in prompts[1:]] == [(answer, 0) for answer in answers[1:]]
    assert ask(llm, prompts[0]) == (answers[0], known(prompts[0]))


@pytest.mark.parametrize("name", [long("scheduler"), long("tokenizer")])
def test_others_die(llm: LLM, name: str) -> None:
    ask_all(llm)
    (process,) = children(llm._engine.process.pid, name)
    process.kill()
    ask_all(llm)
    come_back(llm)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        long("granite-h", {}),
        long("nemotron-h", {}),
        long("qwen3-next", {"tensor_parallel_size": 2}),
        long("qwen3.5", {"tensor_parallel_size": 2, "kv_cache_memory": bytes_of_pages(FAMILY, 30) // 2}),
        long("qwen3.5", {"kept_states": 1, "max_num_batched_tokens": 73, "run_ahead": 3}),
        long("qwen3.5", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
        long("qwen3.5", {"deterministic": True}),
    ],
)
def test_of_other_engines(family: str, options: dict[str, Any]) -> None:
    with small_engine(family, **options) as llm:
        ask_all(llm, family)
        come_back(llm, family)


@pytest.mark.long
def test_two_replicas() -> None:
    """Each has its own."""
    prompts, answers = cases()
    with small_engine(data_parallel_size=2, kv_cache_memory=bytes_of_pages(FAMILY, 17)) as llm:
        for _ in range(3):
            assert generate(llm, prompts, GREEDY) == answers
            now = wait_until_stored(llm)
        assert now.num_host_hits


@pytest.mark.long
def test_states_in_16_bits() -> None:
    """What was cut alike has the same digits, though others have been there meanwhile."""
    prompts, _ = cases()
    with small_engine(state_dtype="bfloat16", kept_states=64, kv_offloading_size=None) as llm:
        wanted = [[ask(llm, prompt) for _ in range(2)][1][0] for prompt in prompts]
    with small_engine(state_dtype="bfloat16") as llm:
        for prompt in prompts:
            ask(llm, prompt)
        wait_until_stored(llm)
        assert [ask(llm, prompt)[0] for prompt in prompts] == wanted
        assert info(llm.address).num_host_hits == sum(map(known, prompts))


@pytest.mark.long
def test_states_are_of_the_weights_that_made_them(tmp_path: Path) -> None:
    """Other weights find nothing of what the first ones left there, nor these of theirs."""
    prompts, wanted = cases()
    other = other_weights(FAMILY, tmp_path)
    theirs = [reference_greedy(other, [prompt], NUM_TOKENS)[0] for prompt in prompts]
    with small_engine() as llm:
        for change, says in ((None, wanted), (other, theirs), (checkpoint(FAMILY), wanted)):
            if change is not None:
                llm.update_weights(change)
            for known_by in (lambda prompt: 0, known):
                assert [ask(llm, prompt) for prompt in prompts] == [
                    (answer, known_by(prompt)) for prompt, answer in zip(prompts, says, strict=True)
                ]
