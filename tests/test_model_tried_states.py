"""Runners of models whose layers carry states, in steps that try tokens: tokens, states and tails are those of plain
steps, to the bit, whatever was tried and however much of it was right.
"""

import itertools
from functools import partial

import msgspec
import pytest
import torch

from checkpoints import random_prompts, reference_greedy
from covering import long
from paged_sequences import CPU, make_decoder
from plan_driver import GREEDY, Job, pack, run_jobs
from repetitive_model import QUIET, repetitive
from tercet.ipc.step_messages import Adjustments, Enter, Sampling, Step
from tercet.model.kv_cache import make_kv_cache
from tercet.model.runner import Runner
from tercet.model.runner_settings import GuessSettings, RunnerSettings
from tercet.model.states import States, make_states, num_places
from tercet.model.trial_shapes import TrialShapes
from tercet.triton_kernels.delta_prefill import TILE

PAGE, MAX_SEQS = 16, 4
model = partial(repetitive, QUIET)

pytestmark = pytest.mark.usefixtures("one_thread")


def make_runner(family: str, num_guesses: int, *, deterministic: bool = False) -> tuple[Runner, States]:
    """Its memory is full of what is no number."""
    decoder = make_decoder(model(family), deterministic=deterministic)
    cache = make_kv_cache(decoder.config, 60, PAGE, torch.float32, CPU, 1)
    for layer in cache.layers:
        layer[:, 1:] = float("nan")
    guesses = GuessSettings(num_guesses=num_guesses, looked_up=(1, 4), most_slots=MAX_SEQS)
    settings = RunnerSettings(
        max_num_seqs=MAX_SEQS, max_model_len=512, max_num_batched_tokens=128, guesses=guesses if num_guesses else None
    )
    most_tried = TrialShapes(guesses).max_rows if num_guesses else 0
    states = make_states(decoder.config, num_places(MAX_SEQS, 1), torch.float32, CPU, 1, most_tried)
    assert states is not None
    for numbers in (states.tails_LSTC, states.states_LSHDV):
        numbers.fill_(float("nan"))
    if states.tries is not None:
        for numbers in (states.tries.inputs_LTC, states.tries.qkv_LTC, states.tries.gates_LT2H):
            numbers.fill_(float("nan"))
    return Runner(decoder, cache, settings, states=states), states


class OneAtATime:
    """A runner and its slots, all of which step together."""

    def __init__(self, runner: Runner, states: States, prompts: list[list[int]], max_tokens: int) -> None:
        self.runner, self.states = runner, states
        self.said: list[list[int]] = [[] for _ in prompts]
        self._step_id = 0
        greedy = msgspec.structs.replace(GREEDY, max_tokens=max_tokens)
        enters = tuple(Enter(slot, pack(*prompt), len(prompt), greedy) for slot, prompt in enumerate(prompts))
        places = itertools.product(range(len(prompts)), range(12))
        pages = [number for slot, at in places for number in (slot, at, 1 + 12 * slot + at)]
        chunks = [number for slot, prompt in enumerate(prompts) for number in (slot, 0, len(prompt))]
        self._run(Step(0, 1, b"", enters, pack(*pages), pack(*chunks), b""), list(range(len(prompts))), 1)

    def step(self, slots: list[int], num_guesses: int) -> None:
        step = Step(self._step_id, 1, b"", (), b"", b"", pack(*slots), num_guesses=num_guesses)
        self._run(step, slots, 1 + num_guesses)

    def _run(self, step: Step, slots: list[int], width: int) -> None:
        self.runner.begin(step)
        tokens = self.runner.launch(0).wait().tolist()
        for row, slot in enumerate(slots):
            self.said[slot] += [token for token in tokens[row * width : (row + 1) * width] if token >= 0]
        self._step_id += 1


@pytest.mark.parametrize(
    ("family", "deterministic", "num_guesses"),
    [
        *(("qwen3.5", False, 3), ("qwen3.5", True, 4), ("granite-h", True, 3)),
        *(long("qwen3-next", False, 7), long("qwen3.5-moe", True, 1), long("granite-h-dense", False, 5)),
    ],
)
def test_states_are_those_of_plain_steps(family: str, deterministic: bool, num_guesses: int) -> None:
    """Behind every step; one of the slots stands still now and then."""
    prompts = [prompt * 2 for prompt in random_prompts(3, 4, 40, seed=5)]
    plain = OneAtATime(*make_runner(family, 0, deterministic=deterministic), prompts, 60)
    tries = OneAtATime(*make_runner(family, num_guesses, deterministic=deterministic), prompts, 60)
    jumps: list[int] = []
    for index in range(70):
        slots = [slot for slot in range(3) if slot != index % 5 and len(tries.said[slot]) < 60]
        before = [len(said) for said in tries.said]
        tries.step(slots, num_guesses if index % 7 else 0)
        jumps += [len(tries.said[slot]) - before[slot] for slot in slots]
        for slot in range(3):
            while len(plain.said[slot]) < len(tries.said[slot]):
                plain.step([slot], 0)
            for name in ("tails_LSTC", "states_LSHDV"):
                ours, theirs = (getattr(run.states, name)[:, slot] for run in (tries, plain))
                assert ours.isfinite().all()
                assert torch.equal(ours, theirs)
        if min(map(len, tries.said)) == 60:
            break
    assert tries.said == plain.said == reference_greedy(model(family), prompts, 60)
    assert {1, num_guesses + 1} <= set(jumps), "none or all were right"
    assert all(len(said) == 60 for said in tries.said)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "num_guesses"), [("qwen3.5", 3), ("qwen3-next", 2), ("qwen3.5-moe", 7), ("granite-h", 2)]
)
def test_guesses_change_no_token(family: str, num_guesses: int) -> None:
    """Greedy and drawn, with stop ids, penalties and log-probabilities; places are used again."""
    prompts = [prompt * 3 for prompt in random_prompts(7, 3, 40, seed=9)]
    sampling = [
        Sampling(temperature=(0.0, 0.3)[index % 2], top_k=0, top_p=1.0, min_p=0.0, seed=index,
                 max_tokens=(1, 2, 40, 33)[index % 4], min_tokens=0, stop_ids=b"",
                 adjustments=Adjustments(0.8, 0.1, -0.2) if index % 4 == 2 else None,
                 logprobs=(None, 2)[index % 5 == 3])
        for index in range(7)
    ]  # fmt: skip
    answers = []
    for seed, guesses in enumerate((0, 0, num_guesses, num_guesses)):
        runner, _ = make_runner(family, num_guesses)
        jobs = [Job(prompt, params) for prompt, params in zip(prompts, sampling, strict=True)]
        how = {"max_seqs": MAX_SEQS, "page_size": PAGE, "budget": 128, "tile": TILE}
        run_jobs(runner, jobs, seed=seed, num_guesses=guesses, **how)
        answers.append([job.output for job in jobs])
        if not seed:  # some end early, at a token that may also be guessed
            for index in (2, 3):
                stop = pack(answers[0][index][20])
                sampling[index] = msgspec.structs.replace(sampling[index], stop_ids=stop, min_tokens=8)
    assert len(set(map(len, answers[1]))) > 3
    assert answers[2] == answers[1]
    assert answers[3] == answers[1]
