"""Several replicas of the model behind one front: the same answers as one's, from both, and what dies in one is mended
there while the other goes on."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import msgspec
import psutil
import pytest
import torch
from anyio.abc import TaskGroup

from checkpoints import random_prompts
from covering import long
from engine_children import children
from tercet.engine import worker
from tercet.engine.child import ChildSpec, Paths
from tercet.engine.config import EngineConfig
from tercet.engine.llm import LLM
from tercet.ipc.addresses import make_addresses
from tercet.ipc.client import Client
from tercet.ipc.messages import EmbeddingParams, SamplingParams, Structured
from whole_engine import PAGE_SIZE, generate, info, tiny_engine, wait_until_empty

NUM_TOKENS = 80
"""Said sooner than what has died is there again."""
PROMPTS = random_prompts(8, 70, 200, seed=3)
PARAMS = [
    SamplingParams(temperature=0.0 if i % 2 else 1.0, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True)
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options = {"heartbeat_timeout": 2, "max_lease": 2, "max_restarts": 100, "restart_window": 0.1}
    with tiny_engine("qwen3", data_parallel_size=2, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def undisturbed(llm: LLM) -> list[list[int]]:
    return generate(llm, PROMPTS, PARAMS)


def of_replica(llm: LLM, name: str, replica: int) -> psutil.Process:
    """As whoever lists processes sees it."""
    said = f"replica {replica} {name}" + (" 0" if name == "worker" else "")
    (process,) = [one for one in children(llm._engine.process.pid, name) if one.cmdline()[-1] == said]
    return process


def is_whole(token_ids: list[int]) -> bool:
    return len(token_ids) == NUM_TOKENS


def test_they_say_what_one_says(llm: LLM, undisturbed: list[list[int]]) -> None:
    """And both do."""
    with tiny_engine("qwen3") as alone:
        assert generate(alone, PROMPTS, PARAMS) == undisturbed
    replicas = wait_until_empty(llm.address).replicas
    assert [one.num_prefix_queries > 0 for one in replicas] == [True, True]
    assert min(one.num_steps for one in replicas) >= NUM_TOKENS


def test_who_has_seen_a_prompt_is_asked_again(llm: LLM) -> None:
    """Whatever was asked in between."""
    prompts = random_prompts(5, 130, 200, seed=4)
    one = SamplingParams(max_tokens=1)
    generate(llm, prompts, one)
    for shift in range(3):
        for prompt in prompts[shift:] + prompts[:shift]:
            (output,) = llm.generate([prompt + [5] * shift], one, use_tqdm=False)
            assert output.usage.num_cached_tokens >= (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE


def test_answers_to_one_prompt_come_from_one_replica(llm: LLM) -> None:
    def prompt_tokens() -> list[int]:
        time.sleep(0.6)  # gauges are refreshed some times a second
        return [one.num_prefix_queries for one in wait_until_empty(llm.address).replicas]

    before = prompt_tokens()
    prompt = random_prompts(1, 100, 100, seed=5)[0]
    (output,) = llm.generate([prompt], SamplingParams(n=4, temperature=1.0, seed=2, max_tokens=5), use_tqdm=False)
    assert len(output.outputs) == 4
    asked = [after - then for then, after in zip(before, prompt_tokens(), strict=True)]
    assert min(asked) == 0 < max(asked)


async def streams(client: Client, tasks: TaskGroup, got: list[list[int]]) -> None:
    """All begin, and have some tokens. Nobody has seen such prompts: half of them are one replica's, about."""
    salt = f"{time.monotonic()}"

    async def stream(index: int) -> None:
        async for piece in client.stream(PROMPTS[index], PARAMS[index], cache_salt=salt):
            got[index] += piece.token_ids

    for index in range(len(PROMPTS)):
        tasks.start_soon(stream, index)
    while min(map(len, got)) < 5:
        await anyio.sleep(0.005)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("worker", signal.SIGKILL),
        long("worker", signal.SIGSTOP),
        ("scheduler", signal.SIGSTOP),
        long("scheduler", signal.SIGKILL),
    ],
)
@pytest.mark.parametrize("replica", [0, long(1)])
async def test_what_dies_in_one_replica_is_not_the_other_ones_matter(
    llm: LLM, undisturbed: list[list[int]], name: str, number: int, replica: int
) -> None:
    """Streams of the other go on, and end, while those of this one stand still; in the end all have said all."""
    got: list[list[int]] = [[] for _ in PROMPTS]
    takes_seconds = (name, number) != ("scheduler", signal.SIGKILL)
    victim, other = of_replica(llm, name, replica), of_replica(llm, "worker", 1 - replica)
    with anyio.fail_after(60):
        async with Client(llm.address) as client, anyio.create_task_group() as tasks:
            await streams(client, tasks, got)
            victim.send_signal(signal.Signals(number))
            assert max(map(len, got)) < NUM_TOKENS
            if takes_seconds:
                await anyio.sleep(0.1)
                then = [len(ids) for ids in got]
                while not any(map(is_whole, got)) or not all(
                    is_whole(ids) or len(ids) == then[index] for index, ids in enumerate(got)
                ):
                    await anyio.sleep(0.005)
                standing = [index for index, ids in enumerate(got) if not is_whole(ids)]
                assert len(standing) >= 2
                if number == signal.SIGKILL:
                    few = msgspec.structs.replace(PARAMS[standing[0]], max_tokens=9)
                    late = await client.generate(PROMPTS[standing[0]], few)
                    assert not any(is_whole(got[index]) for index in standing)
                    assert late.token_ids == undisturbed[standing[0]][:9]
    assert got == undisturbed
    assert not victim.is_running()
    assert other.is_running()
    gauges = await anyio.to_thread.run_sync(wait_until_empty, llm.address)
    assert [one.num_free_pages for one in gauges.replicas] == [one.num_pages - 1 for one in gauges.replicas]


async def test_the_tokenizer_dies(llm: LLM, undisturbed: list[list[int]]) -> None:
    """What ran for it, ends in both; its clients ask its successor for the rest."""
    got: list[list[int]] = [[] for _ in PROMPTS]
    (tokenizer,) = children(llm._engine.process.pid, "tokenizer")
    with anyio.fail_after(60):
        async with Client(llm.address) as client, anyio.create_task_group() as tasks:
            await streams(client, tasks, got)
            tokenizer.kill()
    assert got == undisturbed
    await anyio.to_thread.run_sync(wait_until_empty, llm.address)


@pytest.mark.long
async def test_all_that_can_die_dies(llm: LLM, undisturbed: list[list[int]]) -> None:
    got: list[list[int]] = [[] for _ in PROMPTS]
    with anyio.fail_after(90):
        async with Client(llm.address) as client, anyio.create_task_group() as tasks:
            await streams(client, tasks, got)
            for name in ("scheduler", "worker", "tokenizer"):
                for process in children(llm._engine.process.pid, name):
                    process.kill()
    assert got == undisturbed
    await anyio.to_thread.run_sync(wait_until_empty, llm.address)


async def test_who_is_cancelled_leaves_both(llm: LLM) -> None:
    got: list[list[int]] = [[] for _ in PROMPTS]
    with anyio.fail_after(60):
        async with Client(llm.address) as client:
            async with anyio.create_task_group() as tasks:
                await streams(client, tasks, got)
                tasks.cancel_scope.cancel()
            gauges = await anyio.to_thread.run_sync(wait_until_empty, llm.address)
    assert max(map(len, got)) < NUM_TOKENS
    assert [one.num_free_pages for one in gauges.replicas] == [one.num_pages - 1 for one in gauges.replicas]


@pytest.mark.long
def test_everything_else_is_as_it_was(llm: LLM) -> None:
    """Embeddings, answers held to a form, what is computed at once with both."""
    with tiny_engine("qwen3") as alone:
        for engine in (llm, alone):
            held = SamplingParams(max_tokens=40, structured=Structured(regex="[0-9]{5}"))
            texts = [output.outputs[0].text for output in engine.generate(["a", "b", "c", "d"], held, use_tqdm=False)]
            assert all(len(text) == 5 and text.isdecimal() for text in texts)
        params = EmbeddingParams()
        assert [list(one.values) for one in llm.embed(PROMPTS, params)] == [
            list(one.values) for one in alone.embed(PROMPTS, params)
        ]


@pytest.mark.long
def test_of_two_ranks_each() -> None:
    with tiny_engine("qwen3", data_parallel_size=2, tensor_parallel_size=2) as llm, tiny_engine("qwen3") as alone:
        few = [SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)] * len(PROMPTS)
        assert generate(llm, PROMPTS, few) == generate(alone, PROMPTS, few)
        assert len(children(llm._engine.process.pid, "worker")) == 4
        assert min(one.num_steps for one in info(llm.address).replicas) > 0
        of_replica_0 = [one for one in children(llm._engine.process.pid, "worker") if "replica 0" in one.cmdline()[-1]]
        others = [one for one in children(llm._engine.process.pid, "worker") if one not in of_replica_0]
        of_replica_0[1].kill()
        assert generate(llm, PROMPTS, few) == generate(alone, PROMPTS, few)
        assert all(one.is_running() for one in others)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"data_parallel_size": 2},
            "--data-parallel-size 2 with --tensor-parallel-size 1 takes 2, but there are 1 GPUs",
        ),
        (
            {"data_parallel_size": 4, "tensor_parallel_size": 2},
            "--data-parallel-size 4 with --tensor-parallel-size 2 takes 8, but there are 1 GPUs",
        ),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2, but there are 1 GPUs"),
    ],
)
def test_there_are_too_few_gpus(options: dict[str, int], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=f"^{words}$"):
        worker._takes_gpu(EngineConfig(model="m", **options))  # type: ignore[arg-type]


def test_replicas_have_gpus_side_by_side() -> None:
    config, addresses = EngineConfig(model="m", data_parallel_size=2, tensor_parallel_size=2), make_addresses(2)
    specs = [
        ChildSpec("worker", rank, config, Paths("m"), addresses, 0, replica)
        for replica in range(2)
        for rank in range(2)
    ]
    assert [worker._gpu_index(spec) for spec in specs] == [0, 1, 2, 3]
    assert [spec.name for spec in specs] == [f"replica {n} worker {rank}" for n in range(2) for rank in range(2)]
    Path(addresses.directory).rmdir()
