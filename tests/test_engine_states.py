"""Real engines of models whose layers carry states say what transformers says: all at once, cut, preempted, on ranks,
from copies of states, after a death.
"""

import re
import signal
from typing import Any

import anyio
import pytest

from checkpoints import checkpoint, random_prompts, reference_greedy
from covering import long
from engine_children import children
from tercet.engine.errors import StartupFailed
from tercet.ipc.client import Client
from tercet.ipc.messages import SamplingParams
from whole_engine import (
    GREEDY,
    NUM_TOKENS,
    bytes_of_pages,
    generate,
    greedy_cases,
    ids_of,
    info,
    tiny_engine,
    wait_until_empty,
)

pytestmark = pytest.mark.usefixtures("nan_memory")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "disable_by_batch_size": 4}
TILE = 64
"""A page and a tile end at its multiples."""


def known(prompt: list[int]) -> int:
    """How much of a prompt that was there before need not be computed again."""
    return (len(prompt) - 1) // TILE * TILE


@pytest.mark.parametrize(
    "family",
    ["qwen3.5", "granite-h", long("qwen3-next"), long("qwen3.5-moe"), long("granite-h-dense"), long("nemotron-h")],
)
def test_all_at_once_and_again(family: str) -> None:
    prompts, answers = greedy_cases(family)
    assert max(map(known, prompts)) == TILE
    with tiny_engine(family) as llm:
        assert generate(llm, prompts, GREEDY) == answers
        again = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert ids_of(again) == answers
        assert [output.usage.num_cached_tokens for output in again] == [known(prompt) for prompt in prompts]
        wait_until_empty(llm.address)


def test_copies_of_states_are_begun_from() -> None:
    """By conversations that go on, by a beginning that several share, by answers to one prompt."""
    family, path = "qwen3.5", checkpoint("qwen3.5")
    begun, system, *tails = random_prompts(6, 150, 160, seed=3)
    with tiny_engine(family, kept_states=3, max_num_seqs=4) as llm:

        def ask(prompt: list[int], cached: int) -> list[int]:
            (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
            assert output.usage.num_cached_tokens == cached
            assert [output.outputs[0].token_ids] == reference_greedy(path, [prompt], NUM_TOKENS)
            return output.outputs[0].token_ids

        answer = ask(begun, 0)
        turn = begun + answer + tails[0][:50]
        ask(turn, 128)
        ask(turn + tails[1][:9], known(turn))
        # Nobody knows that these part behind 150 tokens until the second comes; the third begins there.
        for tail, cached in zip(tails[:3], (0, 0, 128), strict=True):
            ask(system[:150] + tail, cached)
        ask(begun, 0)  # of three places none is left to it
        prompt = tails[3]
        three = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, n=3)
        (several,) = llm.generate(prompt, three, use_tqdm=False)
        assert [one.token_ids for one in several.outputs] == reference_greedy(path, [prompt], 8) * 3
        wait_until_empty(llm.address)


@pytest.mark.parametrize(("caching", "kept"), [(True, 1), long(False, 64), long(True, 0)])
def test_preempted_with_a_small_budget(caching: bool, kept: int) -> None:
    family = "qwen3.5"
    prompts, answers = (some[::2] for some in greedy_cases(family))
    options = {"max_num_seqs": 9, "max_num_batched_tokens": 73, "kept_states": kept, "enable_prefix_caching": caching}
    with tiny_engine(family, kv_cache_memory=bytes_of_pages(family, 24), **options) as llm:
        assert info(llm.address).num_pages == 24
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert ids_of(outputs) == answers
        assert sum(output.usage.num_preemptions for output in outputs) > 0
        wait_until_empty(llm.address)


@pytest.mark.parametrize("name", ["worker", long("scheduler")])
def test_answers_go_on_when_states_are_lost(name: str) -> None:
    """Copies that are made before and afterwards, too."""
    path = checkpoint("qwen3.5")
    prompts = random_prompts(3, 70, 150, seed=8)
    wanted = reference_greedy(path, prompts, 70)
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    got: list[list[int]] = [[], [], []]

    async def stream(client: Client, index: int) -> None:
        async for piece in client.stream(prompts[index], params):
            got[index] += piece.token_ids

    async def all_of_them(address: str) -> None:
        async with Client(address) as client, anyio.create_task_group() as tasks:
            for index in range(3):
                tasks.start_soon(stream, client, index)
            while min(map(len, got)) < 5:
                await anyio.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            assert max(map(len, got)) < 70

    with tiny_engine("qwen3.5", restart_window=0.1, max_lease=2) as llm:
        (process,) = children(llm._engine.process.pid, name)
        anyio.run(all_of_them, llm.address)
        assert got == wanted
        assert generate(llm, prompts, params) == wanted
        wait_until_empty(llm.address)


@pytest.mark.parametrize("family", [long("qwen3-next"), long("qwen3.5"), long("qwen3.5-moe"), long("granite-h")])
def test_two_ranks(family: str) -> None:
    prompts, answers = greedy_cases(family)
    with tiny_engine(family, tensor_parallel_size=2, deterministic=True) as llm:
        assert generate(llm, prompts, GREEDY) == answers
        assert generate(llm, prompts, GREEDY) == answers


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3.5", long("granite-h")])
def test_states_in_16_bits(family: str) -> None:
    """Half as large; answers are near, and those of an engine that tries tokens are the same to the token."""
    prompts = [prompt * 2 for prompt in random_prompts(4, 30, 70, seed=9)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    with tiny_engine(family) as llm:
        exact = llm.generate(prompts, params, use_tqdm=False)
    with tiny_engine(family, state_dtype="bfloat16", enable_prefix_caching=False) as llm:
        near = llm.generate(prompts, params, use_tqdm=False)
    with tiny_engine(family, state_dtype="bfloat16", enable_prefix_caching=False, speculative_config=NGRAM) as llm:
        assert ids_of(llm.generate(prompts, params, use_tqdm=False)) == ids_of(near)
    differences = [
        abs(one.outputs[0].cumulative_logprob - other.outputs[0].cumulative_logprob)
        for one, other in zip(exact, near, strict=True)
        if one.outputs[0].token_ids == other.outputs[0].token_ids
    ]
    assert differences
    assert 0 < max(differences) < 0.5


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {}, "--state-dtype got bfloat16, and no layer of this model (family llama) carries a state"),
        ("qwen3.5", {"deterministic": True}, "--state-dtype got 'bfloat16' with --deterministic; want float32"),
    ],
)
def test_states_in_16_bits_are_refused(family: str, options: dict[str, Any], message: str) -> None:
    with (
        pytest.raises((StartupFailed, ValueError), match=re.escape(message)),
        tiny_engine(family, state_dtype="bfloat16", **options),
    ):
        pass


def test_a_budget_without_room_for_a_tile_is_refused() -> None:
    with (
        pytest.raises(StartupFailed, match="--max-num-batched-tokens is 72; want at least 73"),
        tiny_engine("qwen3.5", max_num_seqs=9, max_num_batched_tokens=72),
    ):
        pass
