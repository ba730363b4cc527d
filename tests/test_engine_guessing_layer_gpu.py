"""On a GPU: engines whose model guesses tokens by a layer of its own, of each kind of attention."""

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import make_checkpoint
from eagle_layers import eagle_checkpoint
from guess_cases import answers, draws, settled
from guessing_layers import foreseen_checkpoint, guessing_checkpoint
from tercet.ipc.messages import SamplingParams
from test_engine_gpu import REAL_HEADS, engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TWO = {"method": "mtp", "num_speculative_tokens": 2}
OF_DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}


@pytest.mark.parametrize(
    ("family", "overrides"), [("glm4-moe", {}), ("deepseek-v3", {}), ("qwen3.5", OF_DELTA), ("qwen3-next", OF_DELTA)]
)
def test_fp32_answers_are_those_of_an_engine_that_guesses_nothing(
    family: str, overrides: dict[str, int], tmp_path: Path
) -> None:
    path = guessing_checkpoint(family, tmp_path, **overrides)
    prompts, params = draws()
    with engine(path, dtype="float32") as llm:
        wanted = answers(llm, prompts, params)
    with engine(path, dtype="float32", speculative_config=TWO) as llm:
        assert answers(llm, prompts, params) == wanted
        for index in range(4):
            assert answers(llm, [prompts[index]], [params[index]]) == [wanted[index]]
        assert settled(llm).num_guesses > 0


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("family", "overrides"), [("glm4-moe", REAL_HEADS), ("qwen3.5", REAL_HEADS | OF_DELTA)])
def test_what_follows_from_the_last_token_is_foreseen(
    family: str, overrides: dict[str, int], deterministic: bool, tmp_path: Path
) -> None:
    """In bf16, heads as of real models."""
    path = foreseen_checkpoint(family, tmp_path, **overrides, max_position_embeddings=1024)
    prompts, _ = draws()
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.7}]
    params = [SamplingParams(max_tokens=61, ignore_eos=True, seed=one, **kinds[one % 3]) for one in range(6)]
    how = {"dtype": "bfloat16", "deterministic": deterministic}
    with engine(path, **how) as llm:
        said = answers(llm, prompts[:6], params)
    with engine(path, speculative_config=TWO, **how) as llm:
        assert answers(llm, prompts[:6], params) == said
        for index in range(6):
            assert answers(llm, [prompts[index]], [params[index]]) == [said[index]]
        gauges = settled(llm)
    assert gauges.num_guesses >= 12 * 40
    assert gauges.num_right_guesses >= 0.9 * gauges.num_guesses  # in 16 bits some are drawn from other logits


def eagle_of_real_heads(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A model, and how an engine tries what a layer from another checkpoint guesses."""
    sizes = {**REAL_HEADS, "num_hidden_layers": 7, "max_position_embeddings": 1024}
    model = make_checkpoint("qwen3", folder / "model", **sizes)
    return model, {"method": "eagle3", "model": str(eagle_checkpoint(model, folder / "eagle"))}


def test_a_layer_from_another_checkpoint_changes_no_answer(tmp_path: Path) -> None:
    model, eagle = eagle_of_real_heads(tmp_path)
    prompts, params = draws()
    with engine(model, dtype="float32") as llm:
        wanted = answers(llm, prompts, params)
    with engine(model, dtype="float32", speculative_config={**eagle, "num_speculative_tokens": 3}) as llm:
        assert answers(llm, prompts, params) == wanted
        for index in range(4):
            assert answers(llm, [prompts[index]], [params[index]]) == [wanted[index]]
        assert settled(llm).num_guesses > 0


def test_deterministic_answers_are_the_same_alone_and_together_and_however_many_are_tried(tmp_path: Path) -> None:
    """In bf16."""
    model, eagle = eagle_of_real_heads(tmp_path)
    prompts, params = draws()
    said = []
    for number in (1, 4):
        config = {**eagle, "num_speculative_tokens": number}
        with engine(model, dtype="bfloat16", deterministic=True, speculative_config=config) as llm:
            said.append([answers(llm, [prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)])
            said.append(answers(llm, prompts, params))
            assert settled(llm).num_guesses > 0
    assert said[1:] == said[:1] * 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("which", ["qwen3.5", "eagle3"])
def test_two_ranks_change_no_answer(which: str, tmp_path: Path) -> None:
    model, tries = tmp_path, {**TWO}
    if which == "eagle3":
        model, eagle = eagle_of_real_heads(tmp_path)
        tries |= eagle
    else:
        guessing_checkpoint(which, model, **OF_DELTA)
    prompts, params = draws()
    with engine(model, dtype="float32", tensor_parallel_size=2) as llm:
        wanted = answers(llm, prompts, params)
    with engine(model, dtype="float32", tensor_parallel_size=2, speculative_config=tries) as llm:
        assert answers(llm, prompts, params) == wanted
        assert settled(llm).num_guesses > 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_it_is_foreseen_by_a_head_in_fp8_too(deterministic: bool, tmp_path: Path) -> None:
    """Of 2^26 numbers, in bf16. Random ones, among so many, are nearer to each other than those of models."""
    sizes = REAL_HEADS | OF_DELTA | {"vocab_size": 2**18, "max_position_embeddings": 1024}
    path = foreseen_checkpoint("qwen3.5", tmp_path, **sizes)
    prompts, _ = draws()
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.7}]
    params = [SamplingParams(max_tokens=61, ignore_eos=True, seed=one, **kinds[one % 3]) for one in range(6)]
    how = {"dtype": "bfloat16", "deterministic": deterministic}
    with engine(path, **how) as llm:
        said = answers(llm, prompts[:6], params)
    with engine(path, speculative_config=TWO, **how) as llm:
        both = answers(llm, prompts[:6], params)
        gauges = settled(llm)
    assert both == said or not deterministic  # else a step's size decides which of two that are nearly alike is drawn
    assert gauges.num_guesses >= 6 * 30
    assert gauges.num_right_guesses >= 0.75 * gauges.num_guesses
