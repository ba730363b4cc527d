"""On GPUs: chats that others drove out of the cache come back from the host's memory and say the same, to the bit."""

import json
import random
import time
from pathlib import Path

import pytest
import torch

from shapes import write_shape
from tercet.engine.llm import LLM
from tercet.ipc.messages import SamplingParams
from test_engine_restart_gpu import CONFIG
from whole_engine import generate, info, wait_until_empty

PAGE = 64
PROMPTS = [random.Random(seed).choices(range(100_000), k=800 + 300 * seed) for seed in range(8)]
NUM_PAGES = sum(len(prompt) // PAGE for prompt in PROMPTS)
PARAMS = [
    SamplingParams(temperature=seed % 2, seed=seed, max_tokens=40, logprobs=0, ignore_eos=True) for seed in range(8)
]


@pytest.mark.gpu
@pytest.mark.parametrize("cells", ["auto", "fp8"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_what_left_comes_back(num_ranks: int, cells: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    page_bytes = PAGE * 28 * 2 * 8 * 128 * (1 if cells == "fp8" else 2)
    with LLM(
        str(tmp_path),
        load_format="dummy",
        tensor_parallel_size=num_ranks,
        kv_cache_dtype=cells,
        kv_cache_memory=(NUM_PAGES // 2) * page_bytes // num_ranks,
        kv_offloading_size=2 * NUM_PAGES * page_bytes,
        deterministic=True,
        max_num_seqs=16,
        max_model_len=8192,
    ) as llm:
        assert llm._engine.limits.page_bytes == page_bytes
        leave_and_come_back(llm)
        assert info(llm.address).num_host_hits > NUM_PAGES // 2 * PAGE
    assert "compiled while serving" not in capfd.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_left_comes_back_with_its_state(num_ranks: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where layers carry some."""
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    page_bytes = PAGE * 6 * 2 * 2 * 256 * 2
    with LLM(
        str(write_shape("qwen3.5-0.8b", tmp_path)),
        load_format="dummy",
        tensor_parallel_size=num_ranks,
        kv_cache_memory=(NUM_PAGES // 2) * page_bytes // num_ranks,
        kv_offloading_size=2 << 30,
        kept_states=2,
        deterministic=True,
        max_num_seqs=16,
        max_model_len=8192,
    ) as llm:
        limits = llm._engine.limits
        assert limits.page_bytes == page_bytes
        assert limits.num_host_states >= 2 * len(PROMPTS)
        leave_and_come_back(llm)
        gauges = info(llm.address)
        assert gauges.num_host_hits >= sum((len(prompt) - 1) // PAGE * PAGE for prompt in PROMPTS)
        assert gauges.num_loaded_bytes >= len(PROMPTS) * limits.state_bytes
    assert "compiled while serving" not in capfd.readouterr().err


def leave_and_come_back(llm: LLM) -> None:
    """One at a time, then all at once beside each other, which has the same bits."""
    first = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        first.append(llm.generate([prompt], [params], use_tqdm=False)[0].outputs[0])
        time.sleep(0.1)  # until it is stored
    for prompt, params, one in zip(PROMPTS, PARAMS, first, strict=True):
        (again,) = llm.generate([prompt], [params], use_tqdm=False)
        assert again.outputs[0].token_ids == one.token_ids
        assert again.outputs[0].logprobs == one.logprobs
        assert again.usage.num_cached_tokens == (len(prompt) - 1) // PAGE * PAGE
    assert generate(llm, PROMPTS, PARAMS) == [one.token_ids for one in first]
    wait_until_empty(llm.address)
