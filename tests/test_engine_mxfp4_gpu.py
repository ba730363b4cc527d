"""Engines on a GPU with experts in MXFP4, kept as stored: bits of the numbers that they stand for, in less memory."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import make_checkpoint
from families import VOCAB_SIZE
from mxfp4_checkpoints import in_mxfp4
from tercet.engine.llm import LLM
from tercet.ipc.messages import SamplingParams
from tercet.model.load import load_decoder, open_for
from tercet.model.parallel import Group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
SIZES: dict[str, Any] = {
    "hidden_size": 288,  # neither of whole blocks
    "intermediate_size": 416,
    "num_attention_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 1024,
}


def test_the_bits_of_the_numbers_that_they_stand_for(tmp_path: Path) -> None:
    """Of the log-probabilities of answers: beside others, alone, behind chunks."""
    stored, plain = in_mxfp4(make_checkpoint("gpt-oss", tmp_path / "model", **SIZES), tmp_path)
    assert len(open_for(stored, DEVICE, dtype="bfloat16").kept) == 3 * 32 * 2
    rng = random.Random(4)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 500))] for _ in range(20)]
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=5, ignore_eos=True)
    limits = {"kv_cache_memory": 256 << 20, "max_num_seqs": 20, "max_num_batched_tokens": 1024}
    options: dict[str, Any] = {**limits, "dtype": "bfloat16", "deterministic": True, "enable_prefix_caching": False}

    def answers(model: Path, batches: list[list[list[int]]], **changes: Any) -> list[Any]:
        with LLM(str(model), device="cuda", **{**options, **changes}) as llm:
            return [one.outputs for batch in batches for one in llm.generate(batch, params, use_tqdm=False)]

    wanted = answers(plain, [prompts])
    assert answers(stored, [prompts, prompts[:1], prompts[1:4]]) == wanted + wanted[:4]
    assert answers(stored, [prompts], max_num_batched_tokens=64) == wanted


def test_they_take_less_memory(tmp_path: Path) -> None:
    sizes = {**SIZES, "hidden_size": 1440, "intermediate_size": 1440, "num_local_experts": 8}
    taken = []
    for model in in_mxfp4(make_checkpoint("gpt-oss", tmp_path / "model", **sizes), tmp_path):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        decoder = load_decoder(open_for(model, DEVICE, dtype="bfloat16", max_model_len=512), Group.single(DEVICE))
        taken.append(torch.cuda.memory_allocated() - before)
        del decoder
    assert taken[0] < 0.4 * taken[1]
