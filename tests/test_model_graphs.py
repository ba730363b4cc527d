"""On a GPU: graphs and eager steps say the same, to the bit in any batch; nothing compiles, nothing but Triton runs.

On a small random model in bf16 with the heads and the vocabulary of a real one.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import triton

from launched_kernels import foreign_kernels, launched_kernels
from plan_driver import GREEDY, Job, RandomMasks, masked_jobs, pack, run_jobs
from slot_tables import random_table
from tercet.ipc.step_messages import Adjustments, Draw, Enter, Sampling, Step
from tercet.model import attention
from tercet.model.config import ModelConfig
from tercet.model.decoder import Decoder
from tercet.model.dummy import DummyCheckpoint
from tercet.model.kv_cache import make_kv_cache
from tercet.model.landings import Landing
from tercet.model.parallel import Group
from tercet.model.rope import Rope
from tercet.model.runner import Runner
from tercet.model.runner_settings import GuessSettings, RunnerSettings
from tercet.model.weights import load_weights
from tercet.triton_kernels.matmul_prologue import matmul_prologue
from tercet.triton_kernels.sample import sample, sample_reference
from tercet.triton_kernels.slot_table import SlotTable

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PAGE, MAX_SEQS, MAX_LEN = 64, 38, 1024
SETTINGS = RunnerSettings(max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN, max_num_batched_tokens=2048)


def make_decoder(*, deterministic: bool, guesses: bool = False) -> Decoder:
    device = torch.device("cuda", 0)
    config = ModelConfig(
        family="qwen3", vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_layers=3, num_heads=16,
        num_kv_heads=8, head_dim=128, rms_norm_eps=1e-6, rope=Rope(theta=1e6), max_position_embeddings=4096,
        tie_word_embeddings=True, qk_norm=True, dtype=torch.bfloat16,
    )  # fmt: skip
    tensors = DummyCheckpoint(config, 0, torch.bfloat16, device)
    weights = load_weights(tensors, config, rank=0, size=1, dtype=torch.bfloat16, device=device, interleaved=True)
    ways = {"deterministic": deterministic, "guesses": guesses}
    return Decoder(config, weights, Group.single(device), MAX_LEN, **ways)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return make_decoder(deterministic=True)


def make_runner(decoder: Decoder, *, eager: bool, guesses: GuessSettings | None = None) -> Runner:
    cache = make_kv_cache(decoder.config, 400, PAGE, torch.bfloat16, decoder.group.device, 1)
    cache.blocks[0][:, :, 1:] = float("nan")
    return Runner(decoder, cache, replace(SETTINGS, enforce_eager=eager, guesses=guesses))


@pytest.fixture(scope="module")
def runners(decoder: Decoder) -> tuple[Runner, Runner]:
    """With all graphs, those too that are captured in lulls, and without any."""
    graphs = make_runner(decoder, eager=False)
    while graphs.use_lull():
        pass
    return graphs, make_runner(decoder, eager=True)


def jobs(count: int) -> list[Job]:
    rng = random.Random(5)
    return [
        Job(
            [rng.randrange(100_000) for _ in range(rng.randint(1, 500))],
            Sampling((0.0, 1.0, 0.8)[i % 3], (0, 40)[i % 2], (1.0, 0.9)[i // 2 % 2], 0.0, i, 40, 0, b""),
        )
        for i in range(count)
    ]


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of kernels that compile from here on."""
    names: list[str] = []
    before = triton.knobs.runtime.jit_post_compile_hook

    def hook(*args: Any, **kwargs: Any) -> None:
        names.append(f"{kwargs['fn'].name} {kwargs['key']}")

    triton.knobs.runtime.jit_post_compile_hook = hook
    yield names
    triton.knobs.runtime.jit_post_compile_hook = before


def test_same_tokens_whatever_the_schedule_and_nothing_compiles(
    runners: tuple[Runner, Runner], compiled: list[str]
) -> None:
    graphs, eager = runners
    outputs = []
    for runner, max_seqs, budget in (
        (graphs, 16, 60),
        (graphs, 5, 2000),
        (graphs, 1, 2000),
        (eager, 16, 60),
        (eager, 7, 900),
    ):
        batch = jobs(20)
        run_jobs(runner, batch, max_seqs=max_seqs, page_size=PAGE, seed=max_seqs, budget=budget)
        outputs.append([job.output for job in batch])
    assert len({tuple(tokens) for tokens in outputs[0]}) == 20
    for others in outputs[1:]:
        assert others == outputs[0]
    assert compiled == []


def test_same_tokens_by_graphs_that_are_captured_between_steps(
    decoder: Decoder, runners: tuple[Runner, Runner]
) -> None:
    outputs = []
    for runner in (runners[1], make_runner(decoder, eager=False)):
        batch = jobs(20)
        run_jobs(runner, batch, max_seqs=7, page_size=PAGE, seed=3, budget=900)
        outputs.append([job.output for job in batch])
    assert outputs[1] == outputs[0]


def test_masks_that_come_after_their_step_is_begun(
    runners: tuple[Runner, Runner], compiled: list[str], tmp_path: Path
) -> None:
    """Or too late for its draw: the same tokens as if they had been there."""
    prompts, outputs = [job.prompt for job in jobs(20)], []
    masks = RandomMasks(tmp_path / "masks", MAX_SEQS, runners[0].limits.vocab_size)
    for which, max_seqs in ((1, 5), (1, 9), (0, 1), (0, 16)):
        batch, how = masked_jobs(prompts), {"budget": 900, "masks": masks, "ahead": max_seqs != 5}
        run_jobs(runners[which], batch, max_seqs=max_seqs, page_size=PAGE, seed=max_seqs, **how)
        outputs.append([job.output for job in batch])
    for others in outputs[1:]:
        assert others == outputs[0]
    assert compiled == []


@pytest.mark.parametrize("which", [0, 1], ids=["graphs", "eager"])
def test_only_triton_runs(runners: tuple[Runner, Runner], which: int) -> None:
    runner = runners[which]
    params = msgspec.structs.replace(GREEDY, max_tokens=500)
    lengths = {0: 300, 1: 750, 2: 700, 3: 700, 4: 60, 5: 130}
    told = msgspec.structs.replace(params, logprobs=3, adjustments=Adjustments(1.1, 0.1, 0.1))
    of_prompt = msgspec.structs.replace(params, prompt_logprobs=2)
    enter = tuple(
        Enter(slot, pack(*range(length)), length, {4: told, 5: of_prompt}.get(slot, params))
        for slot, length in lengths.items()
    )
    pages = [x for slot in lengths for k in range(13) for x in (slot, k, 1 + slot * 20 + k)]
    steps = (
        Step(0, 1, b"", enter, pack(*pages), pack(0, 0, 300), b""),
        Step(1, 1, b"", (), b"", pack(1, 0, 750), pack(0)),
        Step(2, 4, b"", (), b"", b"", pack(1, 0)),
        Step(3, 1, b"", (), b"", pack(2, 0, 700, 3, 0, 700), pack(0, 1)),
        Step(4, 1, b"", (), b"", b"", pack(3, 1, 2, 0)),
        Step(5, 1, b"", (), b"", pack(4, 0, 60), pack(3)),
        Step(6, 2, b"", (), b"", b"", pack(3, 4)),
        Step(7, 1, b"", (), b"", pack(5, 0, 130), b""),
        Step(8, 1, b"", (), b"", b"", pack(4, 2, 0), awaits=True),
    )
    draw = Draw(8, 0, b"", "", pack(1))

    def run_steps() -> None:
        for step in steps:
            runner.begin(step)
            for index in range(step.count):
                if step.awaits:
                    runner.launch_model().wait()
                landing = runner.draw(draw) if step.awaits else runner.launch(index)
                assert landing is not None
                token_ids = landing.wait()
                assert ((token_ids >= 0) == [row != 1 or not step.awaits for row in range(len(token_ids))]).all()
                logs, of_prompts, _ = landing.beyond()
                assert (logs is not None) == (step.step_id in (5, 6, 8))
                assert [len(one.words) // 4 for one in of_prompts] == [129 * 2 * 21] * (step.step_id == 7)
                if logs is not None:  # of the last row alone
                    assert np.frombuffer(logs.rows, np.int32).tolist() == [0 if step.awaits else 1]
                    words = np.frombuffer(logs.words, np.int32)
                    assert words[1] >= 1
                    assert np.isfinite(words.view(np.float32)[0])

    run_steps()  # graphs of some are captured by now
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run_steps()
        torch.cuda.synchronize()
    names = launched_kernels(profiler)
    for kernel in ("_prepare_kernel", "_decode_kernel", "prefill_kernel", "_append_kernel", "_merge_kernel"):
        assert any(name.endswith(kernel) for name in names), kernel
    assert foreign_kernels(names) == []
    assert not any("nccl" in name for name in names)


def test_log_probabilities_are_read_by_a_thread_while_graphs_are_captured(
    decoder: Decoder, runners: tuple[Runner, Runner]
) -> None:
    told = msgspec.structs.replace(GREEDY, max_tokens=500, logprobs=3)
    enter = tuple(Enter(slot, pack(*range(slot, slot + 60)), 60, told) for slot in range(5))
    pages = pack(*(x for slot in range(5) for k in range(2) for x in (slot, k, 1 + slot * 2 + k)))
    steps = [Step(0, 1, b"", enter, pages, pack(*(x for slot in range(5) for x in (slot, 0, 60))), b"")]
    steps += [Step(1 + i, 2, b"", (), b"", b"", pack(*range(5 - i))) for i in range(5)]

    def said_by(runner: Runner) -> list[tuple[list[int], bytes]]:
        said = []
        with ThreadPoolExecutor(1) as reader:

            def read(landing: Landing) -> tuple[list[int], bytes]:
                token_ids, (logs, _, _) = landing.wait().tolist(), landing.beyond()
                assert logs is not None
                return token_ids, logs.words

            for step in steps:
                runner.begin(step)
                said += [reader.submit(read, runner.launch(index)) for index in range(step.count)]
            return [one.result() for one in said]

    assert said_by(make_runner(decoder, eager=False)) == said_by(runners[1])


def test_only_default_mode_serves_short_rows_in_another_way(decoder: Decoder) -> None:
    cache = make_kv_cache(decoder.config, 10, PAGE, torch.bfloat16, decoder.group.device, 1)
    assert decoder.short_rows(cache.layers) == 0
    assert make_decoder(deterministic=False).short_rows(cache.layers) == 4


def test_long_prompts_in_one_product_and_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """In default mode: beside decode rows, the cache has the same numbers, rounded elsewhere."""
    default = make_decoder(deterministic=False)
    calls = []

    def counted(x_TK: torch.Tensor, *others: Any) -> None:
        calls.append(len(x_TK))
        matmul_prologue(x_TK, *others)

    def cache_of_steps() -> torch.Tensor:
        cache = make_kv_cache(default.config, 400, PAGE, torch.bfloat16, default.group.device, 1)
        cache.blocks[0][:, :, 1:] = float("nan")
        runner = Runner(default, cache, replace(SETTINGS, enforce_eager=True))
        lengths = {0: 100, 1: 900, 2: 777}
        enter = tuple(Enter(slot, pack(*range(length)), length, GREEDY) for slot, length in lengths.items())
        pages = [x for slot in lengths for k in range(16) for x in (slot, k, 1 + slot * 20 + k)]
        calls.clear()
        for step in (
            Step(0, 1, b"", enter, pack(*pages), pack(0, 0, 100), b""),
            Step(1, 1, b"", (), b"", pack(1, 0, 900, 2, 0, 777), pack(0)),
            Step(2, 1, b"", (), b"", b"", pack(0, 1, 2)),
        ):
            before = cache.blocks[0].clone()
            runner.begin(step)
            assert runner.launch(0).wait().min() >= 0
        return before

    monkeypatch.setattr(attention, "matmul_prologue", counted)
    cache = cache_of_steps()
    assert calls == [calls[0]] * default.config.num_layers  # of the step with long prompts alone
    assert calls[0] >= 1677
    monkeypatch.setattr(attention, "can_fuse_prologue", lambda *sizes: False)
    apart = cache_of_steps()
    assert calls == []
    # Page 0 is that of padding, which is computed by one and left out by the other.
    assert torch.equal(cache[:, :, 1:].isnan(), apart[:, :, 1:].isnan())
    got, wanted = (one[:, :, 1:].nan_to_num(0.0).double() for one in (cache, apart))
    assert torch.equal(got[0, 1, 20:], wanted[0, 1, 20:])  # the prompts' first values, which both round once
    for layer in range(default.config.num_layers):
        for which in range(2):
            difference = (got[layer, which] - wanted[layer, which]).norm() / wanted[layer, which].norm()
            assert difference < 0.02, (layer, which)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sampling_kernels_are_the_reference(dtype: torch.dtype) -> None:
    rows, vocab = 64, 151_936
    generator = torch.Generator().manual_seed(1)
    table = random_table(rows + 1, 8, 64, vocab, 0)
    table.length_S[:rows] = table.length_S[:rows].clamp(max=500)
    table.temperature_S[:] = torch.rand(rows + 1, generator=generator) * 2
    table.temperature_S[:6] = 0.0
    table.top_k_S[:] = torch.randint(0, 60, (rows + 1,), generator=generator).int()
    table.top_k_S[8:16] = 0
    table.top_p_S[:] = 0.3 + torch.rand(rows + 1, generator=generator)
    table.min_p_S[16:] = torch.rand(rows - 15, generator=generator) * 0.2
    slots = torch.randperm(rows, generator=generator).int()
    positions = table.length_S[slots.long()].clone()
    positions[3] = -1
    logits = (torch.randn(rows, vocab, generator=generator) * 3).to(dtype)
    on_gpu = SlotTable(**{field.name: getattr(table, field.name).cuda() for field in fields(SlotTable)})
    got = sample(logits.cuda(), slots.cuda(), positions.cuda(), on_gpu)
    assert got.tolist() == sample_reference(logits, slots, positions, table).tolist()
    for field in fields(SlotTable):
        assert torch.equal(getattr(on_gpu, field.name).cpu(), getattr(table, field.name)), field.name
