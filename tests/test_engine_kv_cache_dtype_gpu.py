"""Whole engines on a GPU with a cache in FP8: nearer to what transformers says with one than to what it says without,
and with --deterministic the same to the bit, however requests are scheduled."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import make_checkpoint, reference_model
from families import VOCAB_SIZE
from fp8_cache import Fp8Cache
from tercet.engine.llm import LLM
from tercet.ipc.messages import SamplingParams
from whole_engine import generate, ids_of, wait_until_empty

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NUM_TOKENS = 40
SIZES = {"head_dim": 128, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), **SIZES, max_position_embeddings=2048)


def engine(model: Path, **options: Any) -> LLM:
    defaults = {"kv_cache_memory": 128 << 20, "max_num_seqs": 40, "max_num_batched_tokens": 2048}
    return LLM(str(model), device="cuda", kv_cache_dtype="fp8", **{**defaults, **options})


def prompts_of(count: int, longest: int) -> list[list[int]]:
    rng = random.Random(12)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("page_size", [64, 16], ids=["hopper", "portable"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_log_probabilities_are_near_those_of_transformers(model: Path, page_size: int, deterministic: bool) -> None:
    """Of a prompt's next token, and of the next one, which a decode step computes. In fp16: what bf16 rounds away of
    this model is more than what FP8 does."""
    prompts = prompts_of(12, 1500)
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=20, ignore_eos=True)
    with engine(model, dtype="float16", page_size=page_size, deterministic=deterministic) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    reference = reference_model(model)
    errors: list[list[float]] = [[], []]  # of each of two tokens
    effects: list[list[float]] = [[], []]
    for prompt, output in zip(prompts, outputs, strict=True):
        (answer,) = output.outputs
        ids = torch.tensor([[*prompt, answer.token_ids[0]]])
        with torch.inference_mode():
            rounded = reference(ids, past_key_values=Fp8Cache()).logits[0, -2:].log_softmax(-1)
            exact = reference(ids).logits[0, -2:].log_softmax(-1)
        assert answer.logprobs is not None
        for which, got in enumerate(answer.logprobs):
            errors[which] += [one.logprob - float(rounded[which, token]) for token, one in got.items()]
            effects[which] += [float(exact[which, token] - rounded[which, token]) for token in got]
    for error, effect in zip(errors, effects, strict=True):
        assert torch.tensor(error).norm() < 0.8 * torch.tensor(effect).norm()


def test_the_same_to_the_bit_however_it_is_scheduled(model: Path) -> None:
    prompts = prompts_of(40, 500)
    params = [
        SamplingParams(temperature=(0.0, 1.0)[i % 2], seed=i, max_tokens=NUM_TOKENS, ignore_eos=True)
        for i in range(len(prompts))
    ]
    with engine(model, dtype="bfloat16", deterministic=True, enable_prefix_caching=False) as llm:
        alone = [generate(llm, [prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
    few_pages = 30 * 64 * 2 * 3 * 2 * 128  # of 64 tokens: k and v, layers, kv heads, head size, a byte each
    for options in (
        {},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 64},
        {"kv_cache_memory": few_pages},
        {"run_ahead": 3, "max_lease": 8, "max_lease_ms": 1e6},
    ):
        with engine(model, dtype="bfloat16", deterministic=True, **options) as llm:
            for _ in range(2):  # the second time behind what the prefix cache has
                outputs = llm.generate(prompts, params, use_tqdm=False)
                assert ids_of(outputs) == alone, options
            assert any(output.usage.num_preemptions for output in outputs) == ("kv_cache_memory" in options)
            wait_until_empty(llm.address)
