"""On a GPU: steps whose end guesses by a layer of the model's own say what plain ones say, to the bit where that is
promised; nothing compiles, and nothing but Triton runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launched_kernels import foreign_kernels, launched_kernels
from plan_driver import GREEDY, RandomMasks, masked_jobs, pack, run_jobs
from tercet.ipc.step_messages import Enter, Step
from tercet.model.blocks import Guesser
from tercet.model.config import ModelConfig
from tercet.model.decoder import Decoder
from tercet.model.dummy import DummyCheckpoint
from tercet.model.eagle_config import EagleConfig
from tercet.model.eagle_shard import OFFSETS, EagleShard
from tercet.model.guess_head import with_guess_head
from tercet.model.parallel import Group
from tercet.model.rank_weights import GuesserWeights
from tercet.model.rope import Rope
from tercet.model.runner import Runner
from tercet.model.runner_settings import GuessSettings
from tercet.model.weights import carry_out, load_weights
from tercet.triton_kernels.dispatch import is_hopper
from test_model_graphs import MAX_LEN, MAX_SEQS, PAGE, compiled, jobs, make_runner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
__all__ = ["compiled"]

TWO = GuessSettings(num_guesses=2, looked_up=None, most_slots=16)
CONFIG = ModelConfig(
    family="qwen3", vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_layers=3, num_heads=16,
    num_kv_heads=8, head_dim=128, rms_norm_eps=1e-6, rope=Rope(theta=1e6), max_position_embeddings=4096,
    tie_word_embeddings=True, qk_norm=True, dtype=torch.bfloat16, guesses=True,
    guesser=Guesser(
        layer="mtp.layers.0.", token_norm="mtp.t_norm", hidden_norm="mtp.h_norm", join="mtp.fc", norm="mtp.norm",
        has_experts=False, goes_on_normed=True,
    ),
)  # fmt: skip


def make_decoder(which: str) -> Decoder:
    """Whose own layer guesses, or one of another checkpoint."""
    device, config = torch.device("cuda", 0), CONFIG if which == "own" else replace(CONFIG, guesser=None, num_layers=7)
    if which != "own":
        config = replace(config, layer_windows=(), layer_ropes=(), layer_heads=())
    on_rank: Any = {"rank": 0, "size": 1, "dtype": torch.bfloat16, "device": device, "interleaved": True}
    weights = load_weights(DummyCheckpoint(config, 0, torch.bfloat16, device), config, **on_rank)
    if which != "own":
        layer = replace(config, family="llama", num_layers=1, vocab_size=5000, joins=True, qk_norm=False, guesses=False)
        layer = replace(layer, layer_windows=(), layer_ropes=(), layer_heads=(), tie_word_embeddings=False)
        shard = EagleShard(EagleConfig(layer, (2, 3, 4), False, config.vocab_size), (OFFSETS,), **on_rank)
        shapes = {move.name: move.shape for move in shard.moves}
        carry_out(shard.moves, DummyCheckpoint(shapes, 1, torch.bfloat16, device))
        weights = replace(weights, guesser=shard.filled())
    return Decoder(config, with_guess_head(weights), Group.single(device), MAX_LEN, deterministic=True, guesses=True)


@pytest.fixture(scope="module", params=["own", "eagle3"])
def runners(request: pytest.FixtureRequest) -> tuple[Runner, Runner]:
    """With all graphs, and without any."""
    decoder = make_decoder(request.param)
    graphs = make_runner(decoder, eager=False, guesses=TWO)
    while graphs.use_lull():
        pass
    return graphs, make_runner(decoder, eager=True, guesses=replace(TWO, most_slots=5))


def test_deterministic_steps_say_the_same_to_the_bit(runners: tuple[Runner, Runner], compiled: list[str]) -> None:
    graphs, eager = runners
    outputs = []
    for runner, max_seqs, budget, num_guesses in (
        (graphs, 16, 60, 0),
        (graphs, 16, 60, 2),
        (graphs, 5, 2000, 2),
        (graphs, 1, 2000, 2),
        (eager, 5, 900, 2),
        (eager, 7, 900, 0),
    ):
        batch = jobs(20)
        how = {"budget": budget, "num_guesses": num_guesses}
        run_jobs(runner, batch, max_seqs=max_seqs, page_size=PAGE, seed=max_seqs, **how)
        outputs.append([job.output for job in batch])
    assert len({tuple(tokens) for tokens in outputs[0]}) == 20
    for others in outputs[1:]:
        assert others == outputs[0]
    assert compiled == []


def test_masks_that_come_after_their_step_is_begun(
    runners: tuple[Runner, Runner], compiled: list[str], tmp_path: Path
) -> None:
    """Guesses are made behind their draws, and tried in steps that have none."""
    prompts, outputs = [job.prompt for job in jobs(12)], []
    masks = RandomMasks(tmp_path / "masks", MAX_SEQS, runners[0].limits.vocab_size)
    for which, max_seqs, num_guesses in ((1, 5, 0), (0, 1, 2), (0, 16, 2)):
        how = {"budget": 900, "masks": masks, "ahead": max_seqs != 5, "num_guesses": num_guesses}
        batch = masked_jobs(prompts)
        run_jobs(runners[which], batch, max_seqs=max_seqs, page_size=PAGE, seed=max_seqs, **how)
        outputs.append([job.output for job in batch])
    for others in outputs[1:]:
        assert others == outputs[0]
    assert compiled == []


@pytest.mark.parametrize("which", [0, 1])
def test_only_triton_runs(runners: tuple[Runner, Runner], which: int) -> None:
    """At the end of a prompt's step, and of such that try what was guessed."""
    runner = runners[which]
    prompt = [5, 6, 7] * 20
    enter = Enter(3, pack(*prompt), len(prompt), GREEDY)
    pages = pack(3, 0, 9, 3, 1, 10)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        runner.begin(Step(0, 1, b"", (enter,), pages, pack(3, 0, len(prompt)), b"", longest=0))
        runner.launch(0).wait()
        runner.begin(Step(1, 2, b"", (), b"", b"", pack(3), longest=len(prompt) + 4, num_guesses=2))
        tokens = [landing.wait().tolist() for landing in [runner.launch(0), runner.launch(1)]]
        torch.cuda.synchronize()
    assert all(len(of_step) == 3 for of_step in tokens)
    names = launched_kernels(profiler)
    for part in ("lay_out", "accept", "next_ids", "guess_rows", "join_normed"):
        assert any(part in name for name in names), part
    if is_hopper(torch.device("cuda", 0)):  # elsewhere it has the name of others
        in_fp8 = isinstance(runner._decoder.weights.guesser, GuesserWeights)  # the head, and no other weights
        assert any("scaled_kernel" in name for name in names) == in_fp8
    assert foreign_kernels(names) == []
