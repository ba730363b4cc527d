"""On a GPU: engines that see answer as transformers, alone and together, guessing or not, on one GPU and on two."""

from typing import Any

import pytest
import torch
from msgspec import structs

from guess_cases import settled
from seeing_guessers import seeing_guesser
from seeing_models import KINDS, Seeing, seeing
from tercet.engine.llm import LLM
from test_engine_gpu import engine
from test_engine_images_whole import GREEDY, NUM_TOKENS, conversations, said, wanted_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MTP = {"method": "mtp", "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}
LONG = structs.replace(GREEDY, max_tokens=60)
OF_FEW = structs.replace(LONG, logit_bias=dict.fromkeys(range(40, 60), 100))
"""Of so few tokens some guesses are right that look behind."""


def guessing(kind: str) -> tuple[Seeing, dict[str, Any]]:
    """A model that sees, and how it guesses."""
    return (seeing_guesser(large=True), MTP) if kind == "qwen3.5" else (seeing(kind, large=True), NGRAM)


def check_guesses(llm: LLM, kind: str) -> None:
    """A layer of random numbers is hardly ever right."""
    gauges = settled(llm)
    assert gauges.num_guesses > 100
    assert gauges.num_right_guesses > 0 or kind == "qwen3.5"


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_answers_are_transformers(kind: str) -> None:
    model = seeing(kind, large=True)
    wanted = wanted_of(model)
    with engine(model.folder, dtype="float32") as llm:
        assert said(llm, conversations()) == wanted
        for _ in range(2):
            assert [said(llm, [one])[0] for one in conversations()] == wanted


@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3-vl"])
def test_fp32_answers_are_those_of_an_engine_that_guesses_nothing(kind: str) -> None:
    model, tries = guessing(kind)
    with engine(model.folder, dtype="float32") as llm:
        wanted = [said(llm, conversations(), params) for params in (LONG, OF_FEW)]
    assert [answer[:NUM_TOKENS] for answer in wanted[0]] == wanted_of(model)
    with engine(model.folder, dtype="float32", speculative_config=tries) as llm:
        for params, answers in zip((LONG, OF_FEW), wanted, strict=True):
            assert said(llm, conversations(), params) == answers
            assert [said(llm, [one], params)[0] for one in conversations()] == answers
        check_guesses(llm, kind)


@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3-vl"])
def test_deterministic_answers_are_the_same_alone_and_together_and_however_many_are_tried(kind: str) -> None:
    """In bf16."""
    model, tries = guessing(kind)
    answers = []
    for config in (tries, {**tries, "num_speculative_tokens": 1}):
        with engine(model.folder, dtype="bfloat16", deterministic=True, speculative_config=config) as llm:
            answers += [said(llm, conversations(), OF_FEW), [said(llm, [one], OF_FEW)[0] for one in conversations()]]
            check_guesses(llm, kind)
    assert answers[1:] == answers[:1] * 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_answer_as_transformers(kind: str) -> None:
    model = seeing(kind, large=True)
    with engine(model.folder, dtype="float32", tensor_parallel_size=2) as llm:
        for _ in range(2):
            assert said(llm, conversations()) == wanted_of(model)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3-vl"])
def test_two_ranks_guess_and_answer_as_one(kind: str) -> None:
    model, tries = guessing(kind)
    with engine(model.folder, dtype="float32") as llm:
        wanted = said(llm, conversations(), OF_FEW)
    with engine(model.folder, dtype="float32", speculative_config=tries, tensor_parallel_size=2) as llm:
        assert said(llm, conversations(), OF_FEW) == wanted
        check_guesses(llm, kind)
