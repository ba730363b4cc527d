"""On a GPU: steps that try tokens ahead say what plain ones say; nothing compiles, and nothing but Triton runs."""

import random
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from launched_kernels import foreign_kernels, launched_kernels
from plan_driver import GREEDY, Job, pack, run_jobs
from slot_tables import random_table
from tercet.ipc.step_messages import Enter, Sampling, Step
from tercet.model.decoder import Decoder
from tercet.model.kv_cache import make_kv_cache
from tercet.model.runner import Runner
from tercet.model.runner_settings import GuessSettings
from tercet.triton_kernels.guess import guess, guess_reference
from test_model_graphs import PAGE, compiled, make_decoder, make_runner
from test_triton_kernels_guess import empty_trials

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
__all__ = ["compiled"]

FOUR = GuessSettings(num_guesses=4, looked_up=(1, 4), most_slots=16)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return make_decoder(deterministic=True, guesses=True)


@pytest.fixture(scope="module")
def runners(decoder: Decoder) -> tuple[Runner, Runner]:
    """With all graphs, and without any."""
    graphs = make_runner(decoder, eager=False, guesses=FOUR)
    while graphs.use_lull():
        pass
    return graphs, make_runner(decoder, eager=True, guesses=FOUR)


def jobs(count: int) -> list[Job]:
    """Prompts and answers that repeat themselves: few ids, and likely ones."""
    rng = random.Random(5)
    return [
        Job(
            [rng.randrange(1000) for _ in range(rng.randint(1, 100))] * rng.randint(1, 4),
            Sampling((0.0, 0.4, 0.2)[i % 3], (0, 2)[i % 2], (1.0, 0.9)[i // 2 % 2], 0.0, i, 60, 0, b""),
        )
        for i in range(count)
    ]


def on(device: torch.device, tensors: Any) -> Any:
    """A dataclass of tensors, there."""
    return replace(tensors, **{field.name: getattr(tensors, field.name).to(device) for field in fields(tensors)})


def test_deterministic_steps_say_the_same_to_the_bit(runners: tuple[Runner, Runner], compiled: list[str]) -> None:
    graphs, eager = runners
    outputs = []
    for runner, max_seqs, budget, num_guesses in (
        (graphs, 16, 60, 0),
        (graphs, 16, 60, 4),
        (graphs, 5, 2000, 4),
        (graphs, 1, 2000, 4),
        (eager, 7, 900, 4),
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


@pytest.mark.parametrize("length", [40, 700, 5000])
@pytest.mark.parametrize("num_slots", [1, 4, 9])
def test_several_tokens_of_a_slot_see_what_rows_apart_see(decoder: Decoder, num_slots: int, length: int) -> None:
    """Keys once for all of a slot, or for each token: hidden states differ by roundings alone."""
    device = torch.device("cuda", 0)
    pages_each = -(-(length + 8) // PAGE)
    num_pages = (num_slots + 1) * pages_each + 1
    table = random_table(num_slots + 1, pages_each, PAGE, 50, 3, num_pages)
    table.length_S[:num_slots] = torch.tensor([length - 3 * slot for slot in range(num_slots)], dtype=torch.int32)
    table.max_length_S[:num_slots] = table.length_S[:num_slots] + 5
    table.max_length_S[0] -= 2  # no room for all
    table = on(device, table)
    cache = make_kv_cache(decoder.config, num_pages, PAGE, torch.bfloat16, device, 1)
    for layer in cache.layers:
        layer.copy_(torch.randn_like(layer))
    trials = on(device, empty_trials([*range(num_slots)], 4))
    guess(trials, table, num_guesses=4, repeated=(1, 4), page_size=PAGE, num_pages=num_pages)
    tried = trials.lengths_T > 0
    hidden = []
    for model, apart in ((decoder, True), (make_decoder(deterministic=False, guesses=True), False)):
        inputs = replace(trials.inputs(apart=apart), shifts_S=table.shift_S)
        out_TD = model.forward(inputs, cache.blocks[0].clone().unbind(), table.page_table_SM)
        hidden.append(out_TD[tried].float())
        assert hidden[-1].isfinite().all()
    assert len(hidden[0]) > num_slots
    scale = hidden[0].square().mean(1).sqrt()
    assert ((hidden[1] - hidden[0]).square().mean(1).sqrt() < 0.03 * scale).all()


def test_what_is_guessed_in_long_slots_is_the_references() -> None:
    device = torch.device("cuda", 0)
    table = random_table(9, 640, PAGE, 7, 11)
    table.length_S[:3] = torch.tensor([40_000, 2048, 2049], dtype=torch.int32)
    wanted = empty_trials([0, 1, 2, 5, 7, 8], 4)
    guess_reference(wanted, table, num_guesses=4, repeated=(2, 8), page_size=PAGE, num_pages=9 * 640 + 1)
    found = on(device, empty_trials([0, 1, 2, 5, 7, 8], 4))
    guess(found, on(device, table), num_guesses=4, repeated=(2, 8), page_size=PAGE, num_pages=9 * 640 + 1)
    tried = wanted.lengths_T > 0
    for field in fields(wanted):
        mine, told = getattr(found, field.name).cpu(), getattr(wanted, field.name)
        if field.name == "kv_slots_XT":  # others go anywhere on the page that is nobody's
            mine, told = mine[tried], told[tried]
        assert torch.equal(mine, told), field.name


@pytest.mark.parametrize("which", [0, 1])
def test_only_triton_runs(runners: tuple[Runner, Runner], which: int) -> None:
    runner = runners[which]
    prompt = [5, 6, 7] * 20
    enter = Enter(3, pack(*prompt), len(prompt), GREEDY)
    pages = pack(3, 0, 9, 3, 1, 10)
    runner.begin(Step(0, 1, b"", (enter,), pages, pack(3, 0, len(prompt)), b"", longest=0))
    runner.launch(0).wait()
    trial = Step(1, 2, b"", (), b"", b"", pack(3), longest=len(prompt) + 6, num_guesses=4)
    runner.begin(trial)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        landings = [runner.launch(0), runner.launch(1)]
        tokens = [landing.wait().tolist() for landing in landings]
        torch.cuda.synchronize()
    assert all(len(of_step) == 5 for of_step in tokens)
    names = launched_kernels(profiler)
    assert any("guess" in name for name in names)
    assert any("accept" in name for name in names)
    assert foreign_kernels(names) == []
