"""The layer that guesses, in fp32 against transformers' modules, whatever the schedule; and that no token changes."""

from pathlib import Path

import msgspec
import pytest

from checkpoints import random_prompts, reference_greedy
from covering import long
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


def make_runner(path: Path, num_guesses: int, most_slots: int = MAX_SEQS) -> Runner:
    opened = open_for(path, CPU, max_model_len=256, guesses=True)
    decoder = load_decoder(opened, Group.single(CPU), guesses=True)
    cache = make_kv_cache(decoder.config, 60, PAGE, decoder.dtype, CPU, 1)
    cache[:, :, 1:] = float("nan")
    guesses = GuessSettings(num_guesses=num_guesses, looked_up=None, most_slots=most_slots)
    states = make_states(decoder.config, MAX_SEQS + 1, decoder.dtype, CPU, 1, MAX_SEQS * (1 + num_guesses))
    settings = RunnerSettings(max_num_seqs=MAX_SEQS, max_model_len=256, max_num_batched_tokens=72, guesses=guesses)
    return Runner(decoder, cache, settings, states=states)


@pytest.mark.parametrize(
    "family", ["glm4-moe", "deepseek-v3", long("glm4-moe-lite"), "qwen3.5", long("qwen3.5-moe"), long("qwen3-next")]
)
def test_guesses_are_the_layers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = guessing_checkpoint(family, tmp_path)
    reference, num_guesses, checked = ReferenceGuesser(family, path), 3, [0] * 3
    run = GuessAhead.run

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
    prompts = random_prompts(6, 2, 40, seed=5)
    wanted = reference_greedy(path, prompts, 24)
    greedy = msgspec.structs.replace(GREEDY, max_tokens=24)
    runner = make_runner(path, num_guesses)
    tile = runner.limits.state_tile or 1
    for seed, how in enumerate(({"num_guesses": num_guesses}, {"num_guesses": num_guesses, "budget": tile + 6}, {})):
        jobs = [Job(prompt, greedy) for prompt in prompts]
        run_jobs(runner, jobs, max_seqs=MAX_SEQS, page_size=PAGE, seed=seed, tile=tile, **how)
        assert [job.output for job in jobs] == wanted
    assert min(checked) > 30
