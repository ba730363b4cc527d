"""The runner with every kernel in Triton's interpreter, on a tiny fp32 model: what is drawn is the same by itself and
beside a request that needs logits in memory, and where tokens are tried ahead. (Greedy tokens have the whole engine's
test.)"""

import msgspec
import pytest
import torch

from checkpoints import checkpoint, random_prompts
from covering import long
from interpreted import rerun_interpreted
from paged_sequences import CPU, make_decoder
from plan_driver import GREEDY, Job, run_jobs
from repetitive_model import CYCLE, FAMILY, QUIET, repetitive
from tercet.ipc.step_messages import Adjustments
from tercet.model.kv_cache import make_kv_cache
from tercet.model.landings import Landing
from tercet.model.runner import Runner
from tercet.model.runner_settings import GuessSettings, RunnerSettings
from tercet.model.states import make_states, num_places
from tercet.triton_kernels.dispatch import INTERPRETED


@pytest.mark.skipif(not INTERPRETED, reason="without kernels there is one way to draw")
def test_a_neighbour_with_thresholds_changes_nothing() -> None:
    torch.set_num_threads(1)
    path = checkpoint("qwen3")
    prompts = random_prompts(2, 3, 5, seed=2)
    plain = msgspec.structs.replace(GREEDY, max_tokens=4, temperature=1.3, seed=3)
    picky = msgspec.structs.replace(plain, max_tokens=3, temperature=0.8, top_p=0.7, seed=4)
    answers = []
    for some in ([plain], [plain, picky]):
        decoder = make_decoder(path, deterministic=True)
        cache = make_kv_cache(decoder.config, 20, 16, torch.float32, CPU, 1)
        settings = RunnerSettings(max_num_seqs=3, max_model_len=512, max_num_batched_tokens=64)
        jobs = [Job(prompt, sampling) for prompt, sampling in zip(prompts, some, strict=False)]
        run_jobs(Runner(decoder, cache, settings), jobs, max_seqs=3, page_size=16, seed=1)
        answers.append([job.output for job in jobs])
    assert answers[0] == answers[1][:1]
    assert len(set(answers[0][0])) > 1


class CountingRunner(Runner):
    num_steps = 0

    def launch(self, index: int) -> Landing:
        self.num_steps += 1
        return super().launch(index)


@pytest.mark.skipif(not INTERPRETED, reason="the references have tests of their own")
@pytest.mark.parametrize(
    ("family", "deterministic"),
    [(FAMILY, False), long(FAMILY, True), long("qwen3.5", False), long("qwen3.5", True), long("granite-h", False)],
)
def test_guesses_change_no_token(family: str, deterministic: bool) -> None:
    """Of a model that says what follows in its prompt; several of them in a step, beside a request with penalties."""
    torch.set_num_threads(1)
    circle = list(range(18, 18 + CYCLE))
    prompts = [circle[:3], [*circle, *circle[:2]], circle[5:]]
    greedy = msgspec.structs.replace(GREEDY, max_tokens=5)
    params = [greedy, greedy, msgspec.structs.replace(greedy, max_tokens=3, adjustments=Adjustments(1.5))]
    answers, num_steps = [], []
    for num_guesses in (0, 3):
        model = repetitive() if family == FAMILY else repetitive(QUIET, family)
        decoder = make_decoder(model, deterministic=deterministic)
        cache = make_kv_cache(decoder.config, 20, 16, torch.float32, CPU, 1)
        states = make_states(decoder.config, num_places(3, 0), torch.float32, CPU, 1, 12)
        tries = GuessSettings(num_guesses=3, looked_up=(1, 3), most_slots=3)
        settings = RunnerSettings(max_num_seqs=3, max_model_len=512, max_num_batched_tokens=64, guesses=tries)
        jobs = [Job(prompt, sampling) for prompt, sampling in zip(prompts, params, strict=True)]
        runner = CountingRunner(decoder, cache, settings, states=states)
        run_jobs(runner, jobs, max_seqs=3, page_size=16, seed=1, num_guesses=num_guesses, tile=64, budget=64)
        answers.append([job.output for job in jobs])
        num_steps.append(runner.num_steps)
    assert answers[1] == answers[0]
    assert num_steps[1] < num_steps[0]


def test_interpreted() -> None:
    rerun_interpreted(__file__)
