"""The layer that guesses, in fp32 against transformers' modules, whatever the schedule; and that no token changes."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from checkpoints import make_checkpoint, random_prompts, reference_greedy
from covering import long
from eagle_layers import ReferenceEagle, eagle_checkpoint
from guessing_layers import ReferenceGuesser, guessing_checkpoint
from paged_sequences import CPU
from plan_driver import GREEDY, Job, run_jobs
from tercet.model.forward_step import Forwarded
from tercet.model.guess_ahead import GuessAhead
from tercet.model.kv_cache import make_kv_cache
from tercet.model.load import load_decoder, open_for
from tercet.model.parallel import Group
from tercet.model.runner import Runner
from tercet.model.runner_settings import GuessSettings, RunnerSettings
from tercet.model.states import make_states
from tercet.model.step_shape import StepShape

PAGE, MAX_SEQS = 16, 4


def make_runner(path: Path, num_guesses: int, eagle: Path | None = None, most_slots: int = MAX_SEQS) -> Runner:
    opened = open_for(path, CPU, max_model_len=256, guesses=eagle is None, eagle=eagle)
    decoder = load_decoder(opened, Group.single(CPU), guesses=True)
    cache = make_kv_cache(decoder.config, 60, PAGE, decoder.dtype, CPU, 1)
    for layer in cache.layers:
        layer[:, 1:] = float("nan")
    guesses = GuessSettings(num_guesses=num_guesses, looked_up=None, most_slots=most_slots)
    states = make_states(decoder.config, MAX_SEQS + 1, decoder.dtype, CPU, 1, MAX_SEQS * (1 + num_guesses))
    settings = RunnerSettings(max_num_seqs=MAX_SEQS, max_model_len=256, max_num_batched_tokens=72, guesses=guesses)
    return Runner(decoder, cache, settings, states=states)


@pytest.mark.parametrize(
    "family",
    ["glm4-moe", long("deepseek-v3"), long("glm4-moe-lite"), "qwen3.5", long("qwen3.5-moe"), long("qwen3-next")],
)
def test_guesses_are_the_layers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = guessing_checkpoint(family, tmp_path)
    check_guesses(path, ReferenceGuesser(family, path), make_runner(path, 3), monkeypatch)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"mapped": True}),
        long("llama", {"speculators": True}),
        long("qwen3", {"mapped": False, "eagle_aux_hidden_state_layer_ids": None}),
    ],
)
def test_guesses_are_those_of_another_checkpoints_layer(
    family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(family, tmp_path / "model", num_hidden_layers=7)
    eagle = eagle_checkpoint(path, tmp_path / "eagle", **options)
    check_guesses(path, ReferenceEagle(path, eagle), make_runner(path, 3, eagle), monkeypatch)


def check_guesses(
    path: Path, reference: ReferenceGuesser | ReferenceEagle, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three guesses in each step, and tokens."""
    checked, run, num_guesses = [0] * 3, GuessAhead.run, 3

    def listen(self: GuessAhead, forwarded: Forwarded, shape: StepShape) -> None:
        run(self, forwarded, shape)
        slots_B = forwarded.rows.slots_R if forwarded.trials is None else forwarded.trials.slots_B
        rows, table = self._rows.cut(len(slots_B)), self._table
        for row, slot in enumerate(slots_B.tolist()):
            length = int(table.length_S[slot])
            ids = table.token_ids_SL[slot].tolist()
            count = int((rows.next_positions_KB[:, row] >= 0).sum())
            wanted = reference.guesses(ids[:length], count)
            for guess in range(count):
                assert int(rows.next_positions_KB[guess, row]) == length + guess
                if guess and int(rows.kv_slots_KB[guess, row]) < PAGE:
                    break  # its keys are nowhere
                assert ids[length + guess] == wanted[guess], (guess, length)
                checked[guess] += 1

    monkeypatch.setattr(GuessAhead, "run", listen)
    prompts = random_prompts(5, 2, 40, seed=5)
    wanted = reference_greedy(path, prompts, 16)
    greedy = msgspec.structs.replace(GREEDY, max_tokens=16)
    tile = runner.limits.state_tile or 1
    for seed, how in enumerate(({"num_guesses": num_guesses, "budget": tile + 6}, {})):
        jobs = [Job(prompt, greedy) for prompt in prompts]
        run_jobs(runner, jobs, max_seqs=MAX_SEQS, page_size=PAGE, seed=seed, tile=tile, **how)
        assert [job.output for job in jobs] == wanted
    assert min(checked) > 20
