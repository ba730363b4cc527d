"""Engines whose model guesses tokens by a layer of its own: the same answers, and guesses that are right."""

from pathlib import Path
from typing import Any

import pytest

from checkpoints import checkpoint
from covering import long
from guess_cases import Answers, answers, draws, settled
from guessing_layers import foreseen_checkpoint, guessing_checkpoint
from tercet.engine.errors import StartupFailed
from tercet.engine.speculation import SpeculativeConfig, speculative_config
from tercet.ipc.messages import SamplingParams
from whole_engine import bytes_of_pages, tiny_engine

pytestmark = pytest.mark.usefixtures("nan_memory")

FAMILY = "glm4-moe"
TWO = {"method": "mtp", "num_speculative_tokens": 2}
Cases = tuple[Path, list[list[int]], list[SamplingParams], Answers]
DISTURBED: dict[str, dict[str, Any]] = {
    "deterministic": {"deterministic": True},
    # With more than three requests in a step nothing is guessed, and then the layer goes on from what it did not see.
    "preempted": {
        "speculative_config": {**TWO, "disable_by_batch_size": 3},
        "kv_cache_memory": bytes_of_pages(FAMILY, 12) * 4 // 3,  # of three layers, and one that guesses
        "max_num_batched_tokens": 64,
        "max_num_seqs": 32,
    },
    "ranks": {"tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def cases(nan_memory: None, tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """What an engine says that guesses nothing."""
    path = guessing_checkpoint(FAMILY, tmp_path_factory.mktemp("guessing"))
    prompts, params = draws()
    with tiny_engine(path) as llm:
        return path, prompts, params, answers(llm, prompts, params)


@pytest.mark.parametrize("how", ["deterministic", "preempted", long("ranks")])
def test_answers_are_those_of_an_engine_that_guesses_nothing(how: str, cases: Cases) -> None:
    path, prompts, params, said = cases
    with tiny_engine(path, **{"speculative_config": TWO, **DISTURBED[how]}) as llm:
        assert answers(llm, prompts, params) == said
        for index in range(3):
            assert answers(llm, prompts[index : index + 1], params[index : index + 1]) == said[index : index + 1]
        gauges = settled(llm)
    assert gauges.num_trials <= gauges.num_guesses <= 2 * gauges.num_trials
    assert gauges.num_guesses > 0
    assert how != "preempted" or gauges.num_preemptions > 0


def test_what_follows_from_the_last_token_is_foreseen(tmp_path: Path) -> None:
    """Drawn as well: of equal logits, guesses are drawn with the noise that tokens will be drawn with."""
    path = foreseen_checkpoint(FAMILY, tmp_path)
    prompts, _ = draws()
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.7}]
    params = [SamplingParams(max_tokens=31, ignore_eos=True, seed=one, **kinds[one % 3]) for one in range(6)]
    with tiny_engine(path) as llm:
        said = answers(llm, prompts[:6], params)
        assert len({token for one in said for token in one[0]}) > 40
    with tiny_engine(path, speculative_config=TWO) as llm:
        assert answers(llm, prompts[:6], params) == said
        gauges = settled(llm)
    # The first token is a prompt's; of 30 others each step gives three.
    assert gauges.num_guesses >= 6 * 20
    assert gauges.num_right_guesses >= 0.97 * gauges.num_guesses


def test_a_model_without_such_a_layer() -> None:
    with pytest.raises(StartupFailed, match=r"method mtp wants a model .* \(family qwen3\) has none"):
        tiny_engine(checkpoint("qwen3"), speculative_config=TWO)


def test_what_may_be_said() -> None:
    as_others_say = speculative_config({"method": "qwen3_next_mtp", "num_speculative_tokens": 2})
    assert as_others_say == SpeculativeConfig(method="mtp", num_speculative_tokens=2)
    with pytest.raises(ValueError, match="prompt_lookup_max came with method mtp"):
        speculative_config({**TWO, "prompt_lookup_max": 3})
    with pytest.raises(ValueError, match="'ngram_gpu'"):
        speculative_config({**TWO, "method": "ngram_gpu"})
