"""Adapters on a GPU: answers of merged weights in fp32; in bf16 the same bits whatever else is in the batch."""

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from adapter_folders import flags, make_adapter, merged_model, says
from checkpoints import checkpoint, make_checkpoint, random_prompts
from tercet.engine.llm import LLM
from tercet.ipc.messages import SamplingParams
from whole_engine import generate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = {"kv_cache_memory": 256 << 20, "max_num_seqs": 24, "max_num_batched_tokens": 512}
REAL_HEADS = {"head_dim": 128, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
OF_STATES = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
NAMES = (None, "sql", "poems")


def adapters(scratch: Path, model: Path) -> dict[str | None, Path | None]:
    seed = random.randrange(10**6)
    return {None: None, **{name: make_adapter(scratch / name, model, seed + len(name)) for name in NAMES if name}}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3", "glm4", "qwen3-moe", "qwen3.5", "qwen3-next"])
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"tensor_parallel_size": 2}], ids=str)
def test_fp32_is_transformers(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    if torch.cuda.device_count() < options.get("tensor_parallel_size", 1):
        pytest.skip("needs two CUDA devices")
    carries_states = family in ("qwen3.5", "qwen3-next")
    path = make_checkpoint(family, tmp_path / "model", **OF_STATES) if carries_states else checkpoint(family)
    folders = adapters(tmp_path, path)
    prompts = random_prompts(24, 1, 300, seed=random.randrange(2**31))
    names = [NAMES[index % 3] for index in range(len(prompts))]
    params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, adapter=name) for name in names]
    with LLM(str(path), device="cuda", dtype="float32", adapter=flags(folders), **options, **SIZES) as llm:
        got = generate(llm, prompts, params)
        plain = generate(llm, prompts[::3], params[::3])  # graphs of steps without any
    models = {name: merged_model(path, folders[name]) for name in NAMES}
    for name, prompt, answer in zip(names, prompts, got, strict=True):
        assert says(models[name], prompt, answer), name
    for prompt, answer in zip(prompts[::3], plain, strict=True):
        assert says(models[None], prompt, answer)


def test_bf16_has_the_same_bits_in_any_company(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path / "model", **REAL_HEADS, max_position_embeddings=1024)
    folders = adapters(tmp_path, model)
    prompts = random_prompts(60, 1, 700, seed=random.randrange(2**31))
    params = [
        SamplingParams(seed=index, max_tokens=40, ignore_eos=True, logprobs=0, adapter=NAMES[index % 3])
        for index in range(len(prompts))
    ]
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "deterministic": True, "adapter": flags(folders)}

    def told(llm: LLM, which: slice) -> list[Any]:
        outputs = llm.generate(prompts[which], params[which], use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        return [
            (one.token_ids, [*(log[t].logprob for log, t in zip(one.logprobs, one.token_ids, strict=True))])
            for one in answers
        ]

    with LLM(str(model), enable_prefix_caching=False, **options, **SIZES) as llm:
        alone = [one for index in range(len(prompts)) for one in told(llm, slice(index, index + 1))]
        assert told(llm, slice(None)) == alone
    with LLM(str(model), **options, **{**SIZES, "max_num_batched_tokens": 2048}) as llm:
        assert told(llm, slice(None)) == alone
        assert told(llm, slice(None)) == alone  # behind cached prefixes


def test_bf16_is_near_merged_weights(tmp_path: Path) -> None:
    """In default mode, with graphs of many sizes: no farther from merged weights in fp32 than those are in bf16. Some
    adapters make much more of what is rounded than others."""
    model = make_checkpoint("llama", tmp_path / "model", **REAL_HEADS, max_position_embeddings=1024)
    folders = adapters(tmp_path, model)
    prompts = random_prompts(20, 1, 700, seed=random.randrange(2**31))
    names = [NAMES[index % 3] for index in range(len(prompts))]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
    each = [structs.replace(params, adapter=name) for name in names]
    with LLM(str(model), device="cuda", dtype="bfloat16", adapter=flags(folders), **SIZES) as llm:
        outputs = llm.generate(prompts, each, use_tqdm=False)
    ours: dict[str | None, list[float]] = {name: [] for name in NAMES}
    theirs: dict[str | None, list[float]] = {name: [] for name in NAMES}
    merged = {name: copy.deepcopy(merged_model(model, folder)).cuda() for name, folder in folders.items()}
    rounded = {name: copy.deepcopy(one).bfloat16() for name, one in merged.items()}
    for name, prompt, output in zip(names, prompts, outputs, strict=True):
        answer = output.outputs[0]
        assert answer.logprobs is not None
        exact, near = (told_by(models[name], prompt, answer.token_ids) for models in (merged, rounded))
        told = [log[token].logprob for log, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        ours[name] += [abs(one - other) for one, other in zip(told, exact, strict=True)]
        theirs[name] += [abs(one - other) for one, other in zip(near, exact, strict=True)]
    for name in NAMES:
        assert sum(ours[name]) < 1.5 * sum(theirs[name]), name


def told_by(model: Any, prompt: list[int], answer: Sequence[int]) -> list[float]:
    """Log-probabilities of the answer's tokens."""
    ids = torch.tensor([[*prompt, *answer]], device="cuda")
    with torch.inference_mode():
        logs = model(ids).logits[0].float().log_softmax(-1)
    told: list[float] = logs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
    return told
