"""Whole engines with pages in the host's memory: chats that others drove out come back, and say what they would have.

Their processes are the real ones, around a tiny checkpoint on the CPU, where copies are made at once.
"""

import functools
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from checkpoints import checkpoint, reference_greedy
from covering import long
from daemon import free_port
from engine_children import children
from tercet.engine.llm import LLM
from tercet.ipc.answers import EngineInfo
from tercet.ipc.client import Client
from tercet.ipc.messages import SamplingParams
from whole_engine import (
    PAGE_SIZE,
    bytes_of_pages,
    generate,
    greedy_cases,
    info,
    tiny_engine,
    wait_until_empty,
)

FAMILY = "qwen3"
NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def small_engine(**options: Any) -> LLM:
    """Its cache is full with two or three requests."""
    cache = {"kv_cache_memory": bytes_of_pages(FAMILY, 20), "kv_offloading_size": 16 << 20}
    return tiny_engine(FAMILY, **{**cache, "max_num_seqs": 4, **options})


@pytest.fixture(scope="module")
def http() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def llm(http: str) -> Iterator[LLM]:
    with small_engine(http=http, max_restarts=100, restart_window=0.1) as llm:
        yield llm


@functools.cache
def cases() -> tuple[list[list[int]], list[list[int]]]:
    """The ten longest prompts, of two to six pages, and what transformers says to them."""
    longest = sorted(zip(*greedy_cases(FAMILY), strict=True), key=lambda case: len(case[0]))[-10:]
    return [prompt for prompt, _ in longest], [answer[:NUM_TOKENS] for _, answer in longest]


def ask_all(llm: LLM, most: int = 10) -> EngineInfo:
    """Each says what transformers does. Then all that is full is stored."""
    prompts, answers = cases()
    assert generate(llm, prompts[:most], GREEDY) == answers[:most]
    return wait_until_stored(llm)


def wait_until_stored(llm: LLM) -> EngineInfo:
    """What is full is, once nobody asks for anything."""
    wait_until_empty(llm.address)
    before = None
    while (now := info(llm.address)) != before:
        before = now
        time.sleep(0.3)  # they are told each quarter of a second
    return now


@pytest.mark.long
def test_what_left_comes_back_to_layers_of_several_sizes() -> None:
    prompts, answers = greedy_cases("gemma4")
    cache = {"kv_cache_memory": bytes_of_pages("gemma4", 20), "kv_offloading_size": 16 << 20}
    with tiny_engine("gemma4", **cache, max_num_seqs=4) as llm:
        for _ in range(2):
            assert [answer[:NUM_TOKENS] for answer in answers] == generate(llm, prompts, GREEDY)
            now = wait_until_stored(llm)
    assert now.num_host_hits > 0
    assert now.num_stored_bytes % bytes_of_pages("gemma4", 1) == 0


def test_what_left_comes_back(llm: LLM, http: str) -> None:
    prompts, answers = cases()
    before = ask_all(llm)
    for prompt, answer in zip(prompts, answers, strict=True):
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == answer
        assert output.usage.num_cached_tokens == (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE >= 2 * PAGE_SIZE
    now = wait_until_stored(llm)
    came, hits = now.num_host_hits - before.num_host_hits, now.num_prefix_hits - before.num_prefix_hits
    assert hits == sum((len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE for prompt in prompts)
    assert hits // 2 < came <= hits
    assert now.num_stored_bytes == before.num_stored_bytes  # nothing twice
    families = text_string_to_metric_families(httpx.get(f"http://{http}/metrics").text)
    values = {sample.name: sample.value for family in families for sample in family.samples}
    for prefix in ("tercet:", "vllm:"):
        assert values[f"{prefix}external_prefix_cache_hits_total"] == now.num_host_hits
        assert values[f"{prefix}prefix_cache_hits_total"] == now.num_prefix_hits - now.num_host_hits
        missed = now.num_prefix_queries - (now.num_prefix_hits - now.num_host_hits)
        assert values[f"{prefix}external_prefix_cache_queries_total"] == missed
        assert values[f"{prefix}kv_offload_store_bytes_total"] == now.num_stored_bytes
        assert values[f"{prefix}kv_offload_load_bytes_total"] == now.num_loaded_bytes


def test_beside_requests_that_leave(llm: LLM) -> None:
    """Some cancel at once, which may be while their pages are on their way."""
    prompts, answers = cases()
    before = info(llm.address).num_host_hits

    async def ask() -> None:
        said: list[list[int]] = [[] for _ in prompts]

        async def stream(client: Client, index: int) -> None:
            async for piece in client.stream(prompts[index], GREEDY):
                said[index] += piece.token_ids
                if index % 3 == 1 and len(said[index]) > index % 5:
                    break

        async def hurry(client: Client, index: int) -> None:
            for milliseconds in range(6):
                with anyio.move_on_after(milliseconds / 1e3):
                    await client.generate(prompts[index], GREEDY)

        async with Client(llm.address) as client, anyio.create_task_group() as tasks:
            for index in range(len(prompts)):
                tasks.start_soon(stream, client, index)
                tasks.start_soon(hurry, client, index)
        for index, answer in enumerate(answers):
            assert said[index] == answer[: len(said[index])]
            assert index % 3 == 1 or len(said[index]) == NUM_TOKENS

    anyio.run(ask)
    wait_until_empty(llm.address)
    assert ask_all(llm).num_host_hits > before


@pytest.mark.long
def test_drawn_tokens_are_the_same(llm: LLM) -> None:
    """Those of chats that go on."""
    prompts, answers = cases()
    turns = [prompt + answer + [7, 8] for prompt, answer in zip(prompts, answers, strict=True)]
    drawn = [SamplingParams(temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True) for seed in range(len(turns))]
    odd = [msgspec.structs.replace(one, repetition_penalty=1.2) if one.seed % 2 else one for one in drawn]
    first, before = generate(llm, turns, odd), wait_until_stored(llm).num_host_hits
    assert generate(llm, turns, odd) == first
    assert wait_until_stored(llm).num_host_hits > before
    with tiny_engine(FAMILY) as large:
        assert generate(large, turns, odd) == first


def test_new_workers_begin_with_nothing(llm: LLM) -> None:
    ask_all(llm, 5)
    (worker,) = children(llm._engine.process.pid, "worker")
    worker.kill()
    before = ask_all(llm, 5)
    now = ask_all(llm, 5)
    assert now.num_stored_bytes >= before.num_stored_bytes > 0
    assert now.num_host_hits > before.num_host_hits


@pytest.mark.parametrize("name", [long("scheduler"), long("tokenizer")])
def test_others_die(llm: LLM, name: str) -> None:
    ask_all(llm)
    (process,) = children(llm._engine.process.pid, name)
    process.kill()
    ask_all(llm)
    assert ask_all(llm).num_host_hits


@pytest.mark.parametrize(
    "options",
    [
        long({"tensor_parallel_size": 2, "kv_cache_memory": bytes_of_pages(FAMILY, 16) // 2}),
        long({"tensor_parallel_size": 2, "data_parallel_size": 2, "kv_cache_memory": bytes_of_pages(FAMILY, 5)}),
        long({"data_parallel_size": 2, "max_num_seqs": 2}),
        long({"max_num_batched_tokens": 19, "max_num_seqs": 5, "run_ahead": 3, "max_lease": 8, "max_lease_ms": 1e6}),
        long({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
        long({"kv_offloading_size": bytes_of_pages(FAMILY, 6)}),
        long({"deterministic": True}),
    ],
    ids=lambda options: "-".join(options),
)
def test_of_other_engines(options: dict[str, Any]) -> None:
    with small_engine(**options) as llm:
        most = 6 if "tensor_parallel_size" in options else 10
        ask_all(llm, most)
        now = ask_all(llm, most)
        assert now.num_loaded_bytes or now.num_host_pages < 7
        assert llm._engine.limits.page_bytes == bytes_of_pages(FAMILY, 1)
        assert now.num_stored_bytes % bytes_of_pages(FAMILY, 1) == 0


@pytest.mark.long
def test_pages_are_of_the_weights_that_made_them(tmp_path: Path) -> None:
    """Other weights find nothing of what the first ones left there, nor these of theirs."""
    prompts, wanted = cases()
    other = other_weights(FAMILY, tmp_path)
    theirs = reference_greedy(other, prompts, NUM_TOKENS)
    with small_engine() as llm:
        for change, says in ((None, wanted), (other, theirs), (checkpoint(FAMILY), wanted)):
            if change is not None:
                llm.update_weights(change)
            hits = info(llm.address).num_host_hits
            for _ in range(2):
                assert generate(llm, prompts, [GREEDY] * len(prompts)) == says
            assert info(llm.address).num_host_hits > hits


def other_weights(family: str, folder: Path) -> Path:
    """Another checkpoint of that kind, which says other things."""
    other = Path(shutil.copytree(checkpoint(family), folder / "other"))
    file, generator = other / "model.safetensors", torch.Generator().manual_seed(1)
    tensors = {
        name: tensor + 0.3 * tensor.std() * torch.randn(tensor.shape, generator=generator) * (tensor.ndim > 1)
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    return other
