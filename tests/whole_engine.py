"""Whole engines, their real processes around tiny checkpoints, and the settings and answers that tests share."""

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from checkpoints import checkpoint, random_prompts, reference_greedy, tiny_config
from tercet.engine.llm import LLM, RequestOutput
from tercet.ipc.answers import EngineInfo
from tercet.ipc.client import Client
from tercet.ipc.messages import SamplingParams

PAGE_SIZE = 16
NUM_TOKENS = 2 * PAGE_SIZE
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def tiny_engine(family: str | Path, **options: Any) -> LLM:
    """An engine of a tiny checkpoint on the CPU: of that family's, or of the one in that folder."""
    model = family if isinstance(family, Path) else checkpoint(family)
    defaults = {"device": "cpu", "page_size": PAGE_SIZE, "kv_cache_memory": 32 << 20}
    return LLM(str(model), **{**defaults, **options})


def bytes_of_pages(family: str, num_pages: int) -> int:
    """What `num_pages` pages of a tiny checkpoint's cache take in fp32, on one rank."""
    config = tiny_config(family)  # no model is made, where tests are only named
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    own = types[: len(types) - getattr(config, "num_kv_shared_layers", 0)]  # others borrow theirs
    layers = [layer for layer, kind in enumerate(own) if kind != "linear_attention"]  # others carry states
    each = config.per_layer_config if family.startswith("gemma4") else [config] * len(types)
    return num_pages * PAGE_SIZE * 4 * sum(numbers_in_cache(each[layer]) for layer in layers)


def disturbances(family: str) -> list[Any]:
    """Options of engines that cut prompts into chunks, preempt requests, or divide the model: what must not matter.

    An engine of its own for each takes longer than what it answers: for `make test` one does the first two at once.
    """
    preempting = {"kv_cache_memory": bytes_of_pages(family, 12), "max_num_seqs": 32, "max_num_batched_tokens": 64}
    cutting = {"max_num_batched_tokens": 7, "max_num_seqs": 5, "run_ahead": 3, "max_lease": 8, "max_lease_ms": 1e6}
    both = {**cutting, "kv_cache_memory": preempting["kv_cache_memory"], "max_num_batched_tokens": 19}
    return [
        pytest.param(both, id="chunks, preempted"),
        pytest.param(cutting, id="chunks", marks=pytest.mark.long),
        pytest.param(preempting, id="preempted", marks=pytest.mark.long),
        pytest.param({"tensor_parallel_size": 2}, id="ranks", marks=pytest.mark.long),  # as of draws: see sampling
    ]


def numbers_in_cache(config: Any) -> int:
    """Of a token, in a layer."""
    if hasattr(config, "kv_lora_rank"):
        return config.kv_lora_rank + config.qk_rope_head_dim
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_key_value_heads * head_dim


@functools.cache
def greedy_cases(family: str) -> tuple[list[list[int]], list[list[int]]]:
    """16 prompts, and what transformers says to them; checked to be worth comparing with."""
    torch.set_num_threads(1)  # threads of tiny products only wait for each other
    prompts = random_prompts(16, 3, 90, seed=7)
    answers = reference_greedy(checkpoint(family), prompts, NUM_TOKENS)
    check_diverse(answers)
    return prompts, answers


def check_diverse(answers: list[list[int]]) -> None:
    """Answers that follow their prompts and do not just repeat a few tokens."""
    assert len(set(map(tuple, answers))) == len(answers)
    assert len({answer[0] for answer in answers}) > len(answers) // 2
    assert min(len(set(answer)) for answer in answers) > NUM_TOKENS // 4


def ids_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def generate(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    """Token ids of the answers."""
    return ids_of(llm.generate(prompts, params, use_tqdm=False))


def info(address: str) -> EngineInfo:
    """What the engine says of itself now."""

    async def ask() -> EngineInfo:
        async with Client(address) as client:
            return await client.info()

    return anyio.run(ask)


def wait_until_empty(address: str, timeout: float = 10.0) -> EngineInfo:
    """The gauges, once nothing runs; every page but the padding's is free then, or the test fails."""
    deadline = time.monotonic() + timeout
    while True:
        gauges = info(address)
        if not (gauges.num_running or gauges.num_waiting) and gauges.num_free_pages == gauges.num_pages - 1 > 0:
            return gauges
        assert time.monotonic() < deadline, f"not at rest: {gauges}"
        time.sleep(0.05)
