"""On the CPU in fp32 a request has the same numbers to the bit, whatever else is in the batch and however it is cut."""

import random
from pathlib import Path
from typing import Any

import pytest

from adapter_folders import make_adapter
from checkpoints import make_checkpoint, random_prompts
from covering import long
from tercet.engine.llm import LLM
from tercet.ipc.messages import SamplingParams
from whole_engine import tiny_engine

SHAPE = {"hidden_size": 128, "intermediate_size": 1088, "max_position_embeddings": 1024}
"""Sums over more than 1,024 numbers are cut, and rows of 32 numbers a thread have no end of their own."""
COUNT = 7
SIGMOIDS = {"n_routed_experts": 32}
"""Vectors of those, too, have no end of their own."""


def told(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    """Tokens and log-probabilities."""
    answers = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        answer, logs = output.outputs[0], [output.prompt_logprobs, output.outputs[0].logprobs]
        told = [[log and {token: one.logprob for token, one in log.items()} for log in each or ()] for each in logs]
        answers.append((answer.token_ids, told))
    return answers


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3", {}),
        long("deepseek-v3", SIGMOIDS),
        *(long(one, {}) for one in ("gemma2", "minicpm3", "mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss")),
        *(long(one, {}) for one in ("deepseek-v2", "deepseek-v2-groups")),
        *(long(one, SIGMOIDS) for one in ("glm4-moe", "dots1", "glm4-moe-lite")),
        long("minimax-m2", {"num_local_experts": 32, "intermediate_size": 96}),
    ],
)
def test_in_any_company(family: str, overrides: dict[str, int], tmp_path: Path) -> None:
    model = make_checkpoint(family, tmp_path / "model", **{**SHAPE, **overrides})
    adapter = (f"one={make_adapter(tmp_path / 'one', model, 1)}",)
    seed = random.randrange(2**31)
    prompts = random_prompts(COUNT, 1, 200, seed=seed)
    params = [
        SamplingParams(
            seed=index, temperature=1, max_tokens=12, ignore_eos=True, logprobs=1,
            prompt_logprobs=(None, 0)[index % 2], adapter=(None, "one")[index % 3 == 2],
        )
        for index in range(COUNT)
    ]  # fmt: skip
    with tiny_engine(model, adapter=adapter, enable_prefix_caching=False) as llm:
        alone = [
            one for index in range(COUNT) for one in told(llm, prompts[index : index + 1], params[index : index + 1])
        ]
        assert told(llm, prompts, params) == alone, seed
    with tiny_engine(model, adapter=adapter, max_num_seqs=5, max_num_batched_tokens=37) as llm:
        for _ in range(2):  # the second time behind cached prefixes
            assert told(llm, prompts, params) == alone, seed
    guessing = {"num_speculative_tokens": 3}
    with tiny_engine(model, adapter=adapter, deterministic=True, speculative_config=guessing) as llm:
        assert told(llm, prompts, params) == alone, seed
