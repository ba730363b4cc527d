"""Engines whose model guesses tokens by a layer of its own: the same answers, and guesses that are right."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import checkpoint, make_checkpoint
from covering import long
from eagle_layers import eagle_checkpoint
from guess_cases import Answers, answers, draws, settled
from guessing_layers import foreseen_checkpoint, guessing_checkpoint
from tercet.engine.errors import StartupFailed
from tercet.engine.speculation import SpeculativeConfig, speculative_config
from tercet.ipc.messages import SamplingParams
from tercet.model.checkpoint import read_config
from tercet.model.config import ModelConfig
from tercet.model.eagle import load_eagle, open_eagle
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


@pytest.mark.parametrize("how", [long("deterministic"), long("preempted"), long("ranks")])
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
    # The first token is a prompt's; of 30 others each step gives three, but for those beside another prompt.
    assert gauges.num_guesses >= 6 * 17
    assert gauges.num_right_guesses >= 0.97 * gauges.num_guesses


@pytest.mark.parametrize("options", [{}, long({"tensor_parallel_size": 2}), long({"deterministic": True})])
def test_a_layer_from_another_checkpoint(options: dict[str, Any], tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path / "model", num_hidden_layers=7)
    eagle = eagle_checkpoint(model, tmp_path / "eagle")
    prompts, params = draws()
    with tiny_engine(model) as llm:
        said = answers(llm, prompts[:8], params[:8])
    tries = {"method": "eagle3", "model": str(eagle), "num_speculative_tokens": 3}
    with tiny_engine(model, speculative_config=tries, **options) as llm:
        assert answers(llm, prompts[:8], params[:8]) == said
        assert answers(llm, prompts[:1], params[:1]) == said[:1]
        assert settled(llm).num_guesses > 0


def test_a_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    model = read_config(checkpoint("qwen3"))

    def refused(words: str, of: ModelConfig = model, **changes: Any) -> None:
        folder = eagle_checkpoint(checkpoint("qwen3"), tmp_path / str(len(words)), **changes)
        with pytest.raises(ValueError, match=words):
            open_eagle(folder, of, torch.float32, torch.device("cpu"))

    refused("hidden_size is 48; want 64, as the model's", hidden_size=48)
    refused("num_key_value_heads is 1; want 2, as the model's", num_key_value_heads=1)
    refused("num_hidden_layers is 2; want 1, one layer", num_hidden_layers=2)
    refused("draft_vocab_size is missing", draft_vocab_size=None)
    refused("model_type is 'gpt2'", model_type="gpt2")
    refused(r"layer_ids is \[2, 9, 1\]; want three of 3 layers", eagle_aux_hidden_state_layer_ids=[2, 9, 1])
    refused("use_aux_hidden_state is false", eagle_config={"use_aux_hidden_state": False})
    refused("quantization_config is not supported", quantization_config={"quant_method": "fp8"})
    refused("cache latents", of=read_config(checkpoint("deepseek-v3")))
    with pytest.raises(ValueError, match=r"--speculative-config: model .* has no config\.json"):
        open_eagle(tmp_path, model, torch.float32, torch.device("cpu"))


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path / "model", num_hidden_layers=7)
    folder = eagle_checkpoint(path, tmp_path / "eagle")
    tensors, model = load_file(folder / "model.safetensors"), read_config(path)
    on_rank: Any = {"rank": 0, "size": 1, "dtype": torch.float32, "device": torch.device("cpu"), "interleaved": False}

    def refused(words: str, **changes: torch.Tensor) -> None:
        save_file({**tensors, **changes}, folder / "model.safetensors")
        with pytest.raises(ValueError, match=words):
            load_eagle(open_eagle(folder, model, torch.float32, torch.device("cpu")), **on_rank)

    refused(r"of the wrong shape: norm.weight \[63\]", **{"norm.weight": torch.ones(63)})
    refused("not part of this model: extra", extra=torch.ones(3))
    refused("d2t names tokens beyond the model's; want ids up to 418", d2t=tensors["d2t"] + 400)
    refused(r"tensor d2t is float32 .*; want whole numbers", d2t=tensors["d2t"].float())
    refused(r"fc.weight is int64 .*; want plain numbers", **{"fc.weight": tensors["fc.weight"].long()})


def test_a_model_without_such_a_layer() -> None:
    with pytest.raises(StartupFailed, match=r"method mtp wants a model .* \(family qwen3\) has none"):
        tiny_engine(checkpoint("qwen3"), speculative_config=TWO)


def test_what_may_be_said() -> None:
    as_others_say = speculative_config({"method": "qwen3_next_mtp", "num_speculative_tokens": 2})
    assert as_others_say == SpeculativeConfig(method="mtp", num_speculative_tokens=2)
    with pytest.raises(ValueError, match="model is None for method eagle3; want the folder or name of a checkpoint"):
        speculative_config({**TWO, "method": "eagle3"})
    with pytest.raises(ValueError, match="model is 'x' for method mtp; want method eagle3"):
        speculative_config({**TWO, "model": "x"})
    with pytest.raises(ValueError, match="prompt_lookup_max came with method mtp"):
        speculative_config({**TWO, "prompt_lookup_max": 3})
    with pytest.raises(ValueError, match="'ngram_gpu'"):
        speculative_config({**TWO, "method": "ngram_gpu"})
