"""On a GPU: engines that try tokens ahead say what they say without, and with `--deterministic` what they say alone."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from guess_cases import Answers, answers, draws, settled
from repetitive_model import FAMILY, QUIET, repetitive
from tercet.engine.llm import LLM
from tercet.ipc.messages import SamplingParams
from test_engine_gpu import REAL_HEADS, engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

THREE = {"num_speculative_tokens": 3, "prompt_lookup_min": 1}
HEADS_OF_STATES = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}


def longer(params: Sequence[SamplingParams]) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=one.temperature, seed=one.seed, max_tokens=150, ignore_eos=True) for one in params
    ]


def of_family(family: str, loudness: float, **heads: int) -> Path:
    """`heads`: of what attends."""
    if family == "qwen3.5":
        return repetitive(QUIET, family, **{**heads, **HEADS_OF_STATES})
    return repetitive(loudness, family, **heads)


@pytest.mark.parametrize("family", [FAMILY, "qwen3.5"])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_fp32_answers_are_those_of_an_engine_that_guesses_nothing(enforce_eager: bool, family: str) -> None:
    prompts, params = draws()
    how, model = {"dtype": "float32", "enforce_eager": enforce_eager}, of_family(family, 0.002)
    with engine(model, **how) as llm:
        wanted = answers(llm, prompts, params)
    with engine(model, speculative_config=THREE, **how) as llm:
        assert answers(llm, prompts, params) == wanted
        for index in range(4):
            assert answers(llm, [prompts[index]], [params[index]]) == [wanted[index]]
        gauges = settled(llm)
    assert 0 < gauges.num_right_guesses < gauges.num_guesses


def _alone(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> Answers:
    return [answers(llm, [prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("family", [FAMILY, "qwen3.5"])
def test_deterministic_answers_are_the_same_alone_and_together_and_however_many_are_tried(family: str) -> None:
    """In bf16, heads as of real models."""
    prompts, params = draws()
    params, model = longer(params), of_family(family, 0.0005, **REAL_HEADS)
    said = []
    for number in (3, 7):
        config = {**THREE, "num_speculative_tokens": number}
        with engine(model, dtype="bfloat16", deterministic=True, speculative_config=config) as llm:
            said += [_alone(llm, prompts, params), answers(llm, prompts, params)]
            assert settled(llm).num_right_guesses > 0
    assert said[1:] == said[:1] * 3
