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


LIMITS: dict[str, Any] = {"kv_cache_memory": 256 << 20, "max_num_seqs": 20, "max_num_batched_tokens": 1024}
OPTIONS: dict[str, Any] = {**LIMITS, "dtype": "bfloat16", "device": "cuda", "enable_prefix_caching": False}
PARAMS = SamplingParams(temperature=0, max_tokens=24, logprobs=5, ignore_eos=True)


def prompts_of(count: int) -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 500))] for _ in range(count)]


def answers(model: Path, batches: list[list[list[int]]], **options: Any) -> list[Any]:
    with LLM(str(model), **{**OPTIONS, **options}) as llm:
        return [one.outputs for batch in batches for one in llm.generate(batch, PARAMS, use_tqdm=False)]


def test_the_bits_of_the_numbers_that_they_stand_for(tmp_path: Path) -> None:
    """Of the log-probabilities of answers: beside others, alone, behind chunks."""
    stored, plain = in_mxfp4(make_checkpoint("gpt-oss", tmp_path / "model", **SIZES), tmp_path)
    assert len(open_for(stored, DEVICE, dtype="bfloat16").kept) == 3 * 32 * 2
    prompts = prompts_of(20)
    wanted = answers(plain, [prompts], deterministic=True)
    assert answers(stored, [prompts, prompts[:1], prompts[1:4]], deterministic=True) == wanted + wanted[:4]
    assert answers(stored, [prompts], deterministic=True, max_num_batched_tokens=64) == wanted


def test_requests_alone_in_default_mode(tmp_path: Path) -> None:
    """Where each pair of a token and an expert is by itself: near what plain experts say so. (Not what they say with
    sums in plain order: near ties go to other experts then.)"""
    stored, plain = in_mxfp4(make_checkpoint("gpt-oss", tmp_path / "model", **SIZES), tmp_path)
    batches = [[prompt] for prompt in prompts_of(8)]
    compared = 0
    for (got,), (wanted,) in zip(answers(stored, batches), answers(plain, batches), strict=True):
        for place, (one, other) in enumerate(zip(got.logprobs, wanted.logprobs, strict=True)):
            for token_id in one.keys() & other.keys():
                assert abs(one[token_id].logprob - other[token_id].logprob) < 0.15
                compared += 1
            if got.token_ids[place] != wanted.token_ids[place]:
                break  # near ties go either way, and what follows them is another text
    assert compared > 100


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
