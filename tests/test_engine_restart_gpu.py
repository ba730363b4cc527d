"""A worker killed on a GPU in the middle of decoding: the text goes on to the bit, and the memory comes back."""

import itertools
import json
import time
from pathlib import Path

import anyio
import psutil
import pytest
import torch

from engine_children import children
from tercet.engine.config import EngineConfig
from tercet.engine.engine_process import EngineProcess
from tercet.ipc.client import Client
from tercet.ipc.messages import SamplingParams

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
PROMPTS = [[17 * i + j for j in range(50 + 40 * i)] for i in range(8)]
PARAMS = [
    SamplingParams(temperature=0.0 if i % 2 else 1.0, seed=i, max_tokens=900, ignore_eos=True)
    for i in range(len(PROMPTS))
]


def used_bytes(num_ranks: int) -> int:
    """Of the ranks' cards together: nobody else may use them meanwhile."""
    infos = [torch.cuda.mem_get_info(rank) for rank in range(num_ranks)]
    return sum(total - free for free, total in infos)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
async def test_text_goes_on_and_memory_comes_back(tmp_path: Path, num_ranks: int) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    before = used_bytes(num_ranks)
    config = EngineConfig(
        model=str(tmp_path),
        load_format="dummy",
        tensor_parallel_size=num_ranks,
        deterministic=True,
        kv_cache_memory=8 << 30,
        max_num_seqs=16,
        max_model_len=8192,
    )
    got: list[list[int]] = [[] for _ in PROMPTS]
    times: list[float] = []

    async def stream(client: Client, index: int) -> None:
        async for piece in client.stream(PROMPTS[index], PARAMS[index]):
            got[index] += piece.token_ids
            times.append(time.monotonic())

    with EngineProcess(config) as engine:
        serving = used_bytes(num_ranks)
        async with Client(engine.address) as client:
            undisturbed = [await client.generate(*case) for case in zip(PROMPTS, PARAMS, strict=True)]
            async with anyio.create_task_group() as tasks:
                for index in range(len(PROMPTS)):
                    tasks.start_soon(stream, client, index)
                while min(map(len, got)) < 300:
                    await anyio.sleep(0.005)
                children(engine.process.pid, "worker")[-1].kill()
                killed_at = max(map(len, got))
        pause = max(after - earlier for earlier, after in itertools.pairwise(times))
        print(f"killed after at most {killed_at} of 900 tokens; {pause:.1f} s until the streams went on")
        assert killed_at < 900
        assert got == [answer.token_ids for answer in undisturbed]
        assert abs(used_bytes(num_ranks) - serving) < 1 << 30
        family = psutil.Process(engine.process.pid).children(recursive=True)
    assert not psutil.wait_procs(family, 10)[1]
    assert used_bytes(num_ranks) - before < 1 << 30
