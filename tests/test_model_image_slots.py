"""Prompts with images through the runner, against transformers: whatever the schedule, the same tokens."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from covering import long
from launched_kernels import foreign_kernels, launched_kernels
from paged_sequences import CPU
from plan_driver import GREEDY, Job, run_jobs
from seeing_models import KINDS, Parts, Seeing, image_of, prompt_with, reference_answer, seeing
from tercet.model.kv_cache import make_kv_cache, page_size_of
from tercet.model.load import load_decoder, open_for
from tercet.model.parallel import Group
from tercet.model.runner import Runner
from tercet.model.runner_settings import RunnerSettings
from tercet.model.states import make_states, num_places, state_tile
from tercet.model.vision_graphs import VisionGraphs

MAX_SEQS, NUM_TOKENS, LENGTH = 4, 14, 256

pytestmark = pytest.mark.usefixtures("one_thread")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def prompts_of(model: Seeing) -> list[Parts]:
    """Images alike but for their pixels, wide and high ones, several in a prompt, and none."""
    return [
        [[5, 6, 7, 8], model.image(3, 2, 1), [9, 10, 11]],
        [[5, 6, 7, 8], model.image(3, 2, 2), [9, 10, 11]],
        [model.image(1, 9, 3), [77], model.image(6, 5, 4), [31]],
        [[*range(40, 80)], model.image(7, 7, 5), [*range(100, 140)], model.image(1, 1, 6), [9]],
        [[50, 60, 70]],
    ]


def make_runner(model: Seeing, device: torch.device, dtype: str, *, deterministic: bool = False, **how: bool) -> Runner:
    opened = open_for(model.folder, device, dtype=dtype, max_model_len=LENGTH, sees=True)
    decoder = load_decoder(opened, Group.single(device), deterministic=deterministic)
    page = 64 if device.type == "cuda" else 16
    cache = make_kv_cache(decoder.config, 40 if page == 64 else 80, page, decoder.dtype, device, 1)
    for layer in cache.layers:
        layer[:, 1:] = float("nan")
    states = make_states(decoder.config, num_places(MAX_SEQS, 0), decoder.dtype, device, 1)
    settings = RunnerSettings(
        max_num_seqs=MAX_SEQS, max_model_len=LENGTH, max_num_batched_tokens=LENGTH, most_image_tokens=64, **how,
    )  # fmt: skip
    return Runner(decoder, cache, settings, states=states)


def answers(runner: Runner, model: Seeing, prompts: list[Parts], seed: int, budget: int) -> list[list[int]]:
    sampling = replace(GREEDY, max_tokens=NUM_TOKENS)
    jobs = []
    for parts in prompts:
        ids, images = prompt_with(model, parts)
        jobs.append(Job(ids, sampling, images=images))
    tile = state_tile(runner._decoder.config) or 1
    page = page_size_of(runner._kv_cache)
    budget = max(budget, tile, runner.limits.image_tokens)
    run_jobs(runner, jobs, max_seqs=MAX_SEQS, page_size=page, seed=seed, budget=budget, tile=tile)
    return [job.output for job in jobs]


@pytest.mark.parametrize("kind", [long(kind) if kind == "glm46v" else kind for kind in KINDS])
def test_answers_are_transformers_whatever_the_schedule(kind: str) -> None:
    check_answers(seeing(kind), CPU)


def test_images_see_each_other_in_windows_that_no_sequence_outgrows(tmp_path: Path) -> None:
    """Gemma 4's do in no other layers."""
    model = seeing("gemma4")
    folder = shutil.copytree(model.folder, tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"]["sliding_window"] = 4 * LENGTH
    (folder / "config.json").write_text(json.dumps(raw))
    check_answers(model._replace(folder=folder, whole=type(model.whole).from_pretrained(folder).eval()), CPU)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_answers_on_a_gpu_are_transformers(kind: str) -> None:
    check_answers(seeing(kind, large=True), torch.device("cuda"))


def check_answers(model: Seeing, device: torch.device) -> None:
    prompts = prompts_of(model)
    wanted = [reference_answer(model, parts, NUM_TOKENS) for parts in prompts]
    assert len(set(map(tuple, wanted))) == len(prompts)
    runner = make_runner(model, device, "float32")
    for seed, budget in enumerate((40, 200, 7)):
        assert answers(runner, model, prompts, seed, budget) == wanted


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_bits_in_any_company(kind: str) -> None:
    """In bf16, deterministic: alone, among others, in other chunks."""
    model, device = seeing(kind, large=True), torch.device("cuda")
    prompts = prompts_of(model)
    runner = make_runner(model, device, "bfloat16", deterministic=True)
    together = answers(runner, model, prompts, 0, 200)
    assert answers(runner, model, prompts, 1, 40) == together
    assert [answers(runner, model, [parts], 2, 200)[0] for parts in prompts] == together


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_only_triton_runs(kind: str) -> None:
    model = seeing(kind, large=True)
    runner = make_runner(model, torch.device("cuda"), "bfloat16", enforce_eager=True)  # captures fill seeds
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        answers(runner, model, prompts_of(model), 0, 200)
        torch.cuda.synchronize()
    names = launched_kernels(profiler)
    assert any("full_attention" in name for name in names)
    assert foreign_kernels(names) == []


@pytest.mark.gpu
@on_gpu
def test_sizes_that_come_again_are_encoded_by_graphs() -> None:
    """Of more sizes than there are graphs, in any order: to the bit what the encoder makes itself."""
    model, device = seeing("qwen2.5-vl", large=True), torch.device("cuda")
    opened = open_for(model.folder, device, dtype="bfloat16", max_model_len=LENGTH, sees=True)
    vision = load_decoder(opened, Group.single(device)).vision
    assert vision is not None
    torch.cuda.set_stream(torch.cuda.Stream())
    graphs = VisionGraphs(vision)
    sizes = [(rows, columns) for rows in range(1, 7) for columns in range(1, 12)]
    random.Random(1).shuffle(sizes)
    for turn, (rows, columns) in enumerate([*sizes, *sizes, *sizes[-8:], *sizes[-30:], *sizes[:9]]):
        pixels = torch.from_numpy(image_of(rows, columns, model.side, turn)).to(device)
        got, wanted = graphs.encode(pixels), vision.encode(pixels)
        assert torch.equal(got.rows_NO, wanted.rows_NO)
        assert len(got.deep) == len(wanted.deep)
