"""The runner against transformers in fp32: any schedule, leases, preemption, seeds, stops: always the same tokens."""

from array import array
from pathlib import Path

import msgspec
import pytest
import torch

from checkpoints import checkpoint, random_prompts, reference_greedy
from covering import long
from paged_sequences import CPU, make_decoder
from plan_driver import GREEDY, Job, RandomMasks, masked_jobs, pack, run_jobs
from tercet.ipc.step_messages import Adjustments, Enter, Sampling, Step
from tercet.model import runner as runner_module
from tercet.model.kv_cache import count_pages, make_kv_cache
from tercet.model.parallel import Group
from tercet.model.runner import Runner
from tercet.model.runner_settings import GuessSettings, RunnerSettings

PAGE, MAX_SEQS, NUM_TOKENS = 16, 5, 26

pytestmark = pytest.mark.usefixtures("one_thread")


def make_runner(family: str = "qwen3", num_pages: int = 60, guesses: GuessSettings | None = None) -> Runner:
    decoder = make_decoder(checkpoint(family))
    cache = make_kv_cache(decoder.config, num_pages, PAGE, torch.float32, CPU, 1)
    for layer in cache.layers:
        layer[:, 1:] = float("nan")
    settings = RunnerSettings(
        max_num_seqs=MAX_SEQS, max_model_len=512, max_num_batched_tokens=64, guesses=guesses
    )  # fmt: skip
    return Runner(decoder, cache, settings)


def outputs(
    runner: Runner, prompts: list[list[int]], sampling: list[Sampling], seed: int, **how: int
) -> list[list[int]]:
    jobs = [Job(prompt, params) for prompt, params in zip(prompts, sampling, strict=True)]
    run_jobs(runner, jobs, max_seqs=MAX_SEQS, page_size=PAGE, seed=seed, **how)
    return [job.output for job in jobs]


def test_masks_that_come_after_their_step_is_begun(tmp_path: Path) -> None:
    """Or too late for its draw: the same tokens as if they had been there, and those that they allow."""
    prompts, runner = random_prompts(8, 1, 50, seed=3), make_runner()
    masks = RandomMasks(tmp_path / "masks", MAX_SEQS, runner.limits.vocab_size)
    said = []
    for ahead, seed in ((False, 0), (True, 1), (True, 2)):
        jobs = masked_jobs(prompts)
        run_jobs(runner, jobs, max_seqs=MAX_SEQS, page_size=PAGE, seed=seed, masks=masks, ahead=ahead)
        said.append([job.output for job in jobs])
    assert said[1] == said[0]
    assert said[2] == said[0]
    assert said[0] != outputs(make_runner(), prompts, [job.sampling for job in masked_jobs(prompts)], seed=0)


@pytest.mark.parametrize("family", ["qwen3", "mistral", *map(long, ("llama", "qwen2", "deepseek-v3"))])
def test_greedy_is_transformers_whatever_the_schedule(family: str) -> None:
    prompts = random_prompts(9, 1, 70, seed=7)
    wanted = reference_greedy(checkpoint(family), prompts, NUM_TOKENS)
    assert len({tuple(tokens[-8:]) for tokens in wanted}) == len(prompts), "prompts must not all end alike"
    greedy = [msgspec.structs.replace(GREEDY, max_tokens=NUM_TOKENS)] * len(prompts)
    runner = make_runner(family)
    # One runner throughout: slots and pages are used again, with other requests' numbers in them.
    assert outputs(runner, prompts, greedy, seed=0) == wanted
    assert outputs(runner, prompts, greedy, seed=1, budget=5, max_lease=7) == wanted
    assert outputs(runner, prompts, greedy, seed=2, budget=200, max_lease=1) == wanted


def test_seeded_sampling_does_not_depend_on_the_schedule() -> None:
    prompts = random_prompts(8, 1, 50, seed=9)
    sampling = [
        Sampling(temperature=0.5 + index / 5, top_k=(0, 9)[index % 2], top_p=(1.0, 0.8)[index // 2 % 2],
                 min_p=(0.0, 0.02)[index // 4], seed=index // 2, max_tokens=NUM_TOKENS, min_tokens=0, stop_ids=b"")
        for index in range(8)
    ]  # fmt: skip
    runner = make_runner("llama")
    first = outputs(runner, prompts, sampling, seed=3)
    assert outputs(runner, prompts, sampling, seed=4, budget=7, max_lease=1) == first
    assert len({tuple(tokens) for tokens in first}) == 8
    alone = [outputs(runner, [prompts[i]], [sampling[i]], seed=i)[0] for i in (1, 6)]
    assert alone == [first[1], first[6]]
    other_seed = [msgspec.structs.replace(params, seed=params.seed + 1) for params in sampling]
    assert all(a != b for a, b in zip(outputs(runner, prompts, other_seed, seed=3), first, strict=True))


@pytest.mark.parametrize(("family", "num_guesses"), [long("llama", 1), ("llama", 4), ("deepseek-v3", 3)])
def test_guesses_change_no_token(family: str, num_guesses: int) -> None:
    """Greedy and drawn, with stop ids, penalties and log-probabilities and without; prompts that repeat themselves, so
    that there is much to guess."""
    prompts = [prompt * 3 for prompt in random_prompts(8, 3, 20, seed=9)]
    sampling = [
        Sampling(temperature=(0.0, 0.3, 0.8)[index % 3], top_k=(0, 9)[index // 2 % 2], top_p=1.0, min_p=0.0, seed=index,
                 max_tokens=(1, 2, NUM_TOKENS, 21)[index % 4], min_tokens=0, stop_ids=b"",
                 adjustments=Adjustments(0.8, 0.1, -0.2) if index % 4 == 2 else None,
                 logprobs=(None, 2)[index % 5 == 3])
        for index in range(8)
    ]  # fmt: skip
    runner = make_runner(family)
    plain = outputs(runner, prompts, sampling, seed=3)
    for index in (2, 3, 6):  # ends early, at a token that may also be guessed
        sampling[index] = msgspec.structs.replace(sampling[index], stop_ids=pack(plain[index][13]), min_tokens=8)
    plain = outputs(runner, prompts, sampling, seed=3)
    assert len({len(tokens) for tokens in plain}) > 3
    guessing = make_runner(
        family, guesses=GuessSettings(num_guesses=num_guesses, looked_up=(1, 4), most_slots=MAX_SEQS)
    )  # fmt: skip
    for seed, how in enumerate(({}, {"max_lease": 1}, {"budget": 7})):
        assert outputs(guessing, prompts, sampling, seed=seed, num_guesses=num_guesses, **how) == plain


def test_preempted_requests_go_on_with_the_same_tokens() -> None:
    """A request that enters again with what it had generated says what it would have said."""
    prompts = random_prompts(4, 5, 40, seed=2)
    sampling = [msgspec.structs.replace(GREEDY, max_tokens=30, seed=5, temperature=(0.0, 0.9)[i % 2]) for i in range(4)]
    runner = make_runner()
    whole = outputs(runner, prompts, sampling, seed=0)
    for cut in (1, 17, 29):
        # The engine's Enter: all tokens so far, and the length of the prompt as the user gave it.
        jobs = [
            Job(prompt + tokens[:cut], params) for prompt, tokens, params in zip(prompts, whole, sampling, strict=True)
        ]
        for job, prompt in zip(jobs, prompts, strict=True):
            job.num_prompt = len(prompt)
        run_jobs(runner, jobs, max_seqs=MAX_SEQS, page_size=PAGE, seed=cut)
        assert [job.output for job in jobs] == [tokens[cut:] for tokens in whole]


def test_stop_ids_and_min_tokens() -> None:
    prompts = random_prompts(6, 5, 30, seed=4)
    plain = msgspec.structs.replace(GREEDY, max_tokens=NUM_TOKENS)
    runner = make_runner()
    free = outputs(runner, prompts, [plain] * 6, seed=0)
    stops = [tokens[11] for tokens in free]
    stopping = [msgspec.structs.replace(plain, stop_ids=pack(7, stop)) for stop in stops]
    got = outputs(runner, prompts, stopping, seed=1)
    for tokens, unstopped, stop in zip(got, free, stops, strict=True):
        first = min((unstopped.index(i) for i in (7, stop) if i in unstopped), default=NUM_TOKENS)
        assert tokens == unstopped[: first + 1]
        assert tokens[-1] in (7, stop)
    late = [msgspec.structs.replace(params, min_tokens=20) for params in stopping]
    for tokens, params in zip(outputs(runner, prompts, late, seed=2), late, strict=True):
        stop_ids = array("i", params.stop_ids)
        assert len(tokens) > 20
        assert not set(tokens[:20]) & set(stop_ids)
        assert len(tokens) == NUM_TOKENS or tokens[-1] in stop_ids


def test_long_changes_come_in_several_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts(5, 60, 90, seed=6)
    greedy = [msgspec.structs.replace(GREEDY, max_tokens=8)] * 5
    wanted = reference_greedy(checkpoint("qwen3"), prompts, 8)
    monkeypatch.setattr(runner_module, "_CHANGE_WORDS", 64)
    assert outputs(make_runner(), prompts, greedy, seed=0) == wanted


def test_done_rows_cost_nothing() -> None:
    """A lease that outlives its requests: -1, and the model is not asked."""
    runner = make_runner()
    params = msgspec.structs.replace(GREEDY, max_tokens=2)
    enter = (Enter(3, pack(5, 6, 7), 3, params),)
    runner.begin(Step(0, 1, b"", enter, pack(3, 0, 4), pack(3, 0, 3), b""))
    assert runner.launch(0).wait()[0] >= 0
    runner.begin(Step(1, 3, b"", (), b"", b"", pack(3)))
    assert runner.launch(0).wait()[0] >= 0
    object.__setattr__(runner, "_decoder", None)
    assert runner.launch(1).wait().tolist() == [-1]
    assert runner.launch(2).wait().tolist() == [-1]


def test_limits() -> None:
    limits = make_runner(num_pages=7).limits
    assert (limits.num_pages, limits.max_model_len, limits.dtype, limits.device) == (7, 512, "float32", "cpu")


def test_page_count() -> None:
    config = make_decoder(checkpoint("llama")).config
    group = Group.single(CPU)
    page_bytes = config.kv_bytes_per_page(PAGE, torch.float32, 1)
    cache = make_kv_cache(config, 5, PAGE, torch.float32, CPU, 1)
    assert sum(block.nbytes for block in cache.blocks) == 5 * page_bytes
    assert count_pages(config, 10 * page_bytes + 1, PAGE, torch.float32, group) == 10
    with pytest.raises(ValueError, match=r"want at least two pages; raise --kv-cache-memory"):
        count_pages(config, 2 * page_bytes - 1, PAGE, torch.float32, group)


def test_uneven_memory_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    config = make_decoder(checkpoint("qwen3")).config
    page_bytes = config.kv_bytes_per_page(PAGE, torch.float32, 1)
    group = Group.single(CPU)
    monkeypatch.setattr(group, "min", lambda value: min(value, 50))
    assert count_pages(config, 52 * page_bytes, PAGE, torch.float32, group) == 50
    assert not caplog.records
    assert count_pages(config, 80 * page_bytes, PAGE, torch.float32, group) == 50
    assert "rank 0 has room for 80 pages, another for 50: " in caplog.text


@pytest.mark.parametrize("family", ["mistral", "minicpm3", long("llama")])
def test_a_copied_page_serves_another_answer(family: str) -> None:
    """Two answers to one prompt part in the middle of a page; the second enters while the first is under way."""
    (prompt,) = random_prompts(1, 2 * PAGE + 5, 2 * PAGE + 5, seed=17)
    drawn = [msgspec.structs.replace(GREEDY, temperature=1.5, seed=seed, max_tokens=20) for seed in (1, 2)]
    wanted = [outputs(make_runner(family), [prompt], [params], seed=0)[0] for params in drawn]
    assert wanted[0] != wanted[1]
    runner, last = make_runner(family), len(prompt) - 1
    enter = [Enter(slot, pack(*prompt), len(prompt), params) for slot, params in zip((3, 0), drawn, strict=True)]
    pages = pack(3, 0, 7, 3, 1, 8, 3, 2, 9, 3, 3, 20)
    runner.begin(Step(0, 1, b"", (enter[0],), pages, pack(3, 0, last + 1), b""))
    said = [[int(runner.launch(0).wait()[0])], []]
    runner.begin(Step(1, 4, b"", (), b"", b"", pack(3)))
    said[0] += [int(runner.launch(index).wait()[0]) for index in range(4)]
    pages = pack(0, 0, 7, 0, 1, 8, 0, 2, 4, 0, 3, 5)
    runner.begin(Step(2, 1, b"", (enter[1],), pages, pack(0, last, 1), pack(3), copies=pack(9, 4, -1, -1)))
    for _ in range(16):
        for answer, token in zip(said, runner.launch(0).wait().tolist(), strict=True):
            answer += [token] * (token >= 0)
        runner.begin(Step(3, 1, b"", (), b"", b"", pack(3, 0)))
    runner.begin(Step(4, 4, b"", (), b"", b"", pack(0)))
    said[1] += [int(runner.launch(index).wait()[0]) for index in range(4)]
    assert said == wanted
