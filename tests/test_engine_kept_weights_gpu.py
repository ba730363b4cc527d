"""Engines on a GPU whose weights are kept as stored: the bits of the numbers that they stand for, in less memory."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from checkpoints import make_checkpoint
from families import VOCAB_SIZE
from launched_kernels import foreign_kernels, launched_kernels
from plan_driver import GREEDY as GREEDY_STEPS
from plan_driver import Job, run_jobs
from quantized_checkpoints import LARGE, Way, awq, fp8, gptq, packed, quantized
from tercet.engine.llm import LLM
from tercet.ipc.messages import SamplingParams
from tercet.model.decoder import Decoder
from tercet.model.kv_cache import make_kv_cache
from tercet.model.load import load_decoder, open_for
from tercet.model.parallel import Group
from tercet.model.runner import Runner
from tercet.model.runner_settings import RunnerSettings
from tercet.triton_kernels.dispatch import is_hopper
from test_model_quantized import compressed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
WAYS = {
    "blocks": Way({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8(128, 128)),
    "small blocks": Way({"quant_method": "fp8", "weight_block_size": [48, 64]}, fp8(48, 64)),
    "rows": Way({"quant_method": "fbgemm_fp8"}, fp8(1, 0, "weight_scale")),
    "awq": Way({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, awq(128)),
    "packed": Way(
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=128),
        packed(4, 128, True, dtype=torch.bfloat16),
    ),
    "gptq": Way({"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False}, gptq(4, 64, 1)),
}


def models(folder: Path, way: str) -> tuple[Path, Path]:
    """One that is kept so, and the plain one that it stands for."""
    if way not in ("awq", "packed", "gptq") and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU that has FP8")
    model = make_checkpoint("qwen3", folder / "model", **LARGE, max_position_embeddings=1024)
    both = quantized(model, WAYS[way], folder)
    shutil.rmtree(model)  # each takes up to 0.8 GB
    return both


def prompts_of(count: int, longest: int) -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        ("blocks", "bfloat16"),
        ("small blocks", "float16"),
        ("rows", "bfloat16"),
        ("blocks", "float32"),
        ("awq", "float16"),
        ("awq", "bfloat16"),
        ("packed", "bfloat16"),
        ("gptq", "float16"),
    ],
)
def test_the_bits_of_the_numbers_that_they_stand_for(way: str, dtype: str, tmp_path: Path) -> None:
    """Of the log-probabilities of answers: beside others, alone, behind chunks. In fp32 they are expanded at once."""
    stored, meant = models(tmp_path, way)
    kept = open_for(stored, DEVICE, dtype=dtype).kept
    assert bool(kept) == (dtype != "float32")
    prompts = prompts_of(20, 500)
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=5, ignore_eos=True)
    limits = {"kv_cache_memory": 256 << 20, "max_num_seqs": 20, "max_num_batched_tokens": 1024}
    options: dict[str, Any] = {**limits, "dtype": dtype, "deterministic": True, "enable_prefix_caching": False}

    def answers(model: Path, batches: list[list[list[int]]], **changes: Any) -> list[Any]:
        with LLM(str(model), device="cuda", **{**options, **changes}) as llm:
            return [one.outputs for batch in batches for one in llm.generate(batch, params, use_tqdm=False)]

    wanted = answers(meant, [prompts])
    assert answers(stored, [prompts, prompts[:1], prompts[1:4]]) == wanted + wanted[:4]
    assert answers(stored, [prompts], max_num_batched_tokens=64) == wanted


def decoder_of(model: Path) -> tuple[Decoder, int]:
    """And the memory of its weights."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    decoder = load_decoder(open_for(model, DEVICE, dtype="bfloat16", max_model_len=512), Group.single(DEVICE))
    return decoder, torch.cuda.memory_allocated() - before


@pytest.mark.parametrize(("way", "part"), [("blocks", 0.55), ("packed", 0.3)])
def test_they_take_less_memory(way: str, part: float, tmp_path: Path) -> None:
    few, many = (decoder_of(model)[1] for model in models(tmp_path, way))
    assert few < part * many


@pytest.mark.parametrize("way", ["blocks", "packed"])
def test_only_triton_runs(way: str, tmp_path: Path) -> None:
    decoder, _ = decoder_of(models(tmp_path, way)[0])
    settings = RunnerSettings(max_num_seqs=9, max_model_len=512, max_num_batched_tokens=512, enforce_eager=True)
    runner = Runner(decoder, make_kv_cache(decoder.config, 100, 64, torch.bfloat16, DEVICE, 1), settings)
    one = structs.replace(GREEDY_STEPS, max_tokens=9)
    batch = [Job(prompt, one) for prompt in prompts_of(8, 400)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run_jobs(runner, batch, max_seqs=8, page_size=64, seed=1, budget=300)
        torch.cuda.synchronize()
    assert all(len(job.output) == 9 for job in batch)
    names = launched_kernels(profiler)
    reads_fp8 = "scaled_kernel" if is_hopper(DEVICE) else "_expand_kernel"  # of hundreds of rows
    assert any(reads_fp8 in name for name in names)
    assert foreign_kernels(names) == []


def test_rounded_while_they_are_read(tmp_path: Path) -> None:
    """The bits of a checkpoint of the rounded numbers."""

    def by_rows(weight: torch.Tensor, rng: object) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        scales = weight.abs().amax(1, keepdim=True) / 448
        return {}, (weight / scales).to(torch.float8_e4m3fn).float() * scales

    model = make_checkpoint("qwen3", tmp_path / "model", **LARGE, max_position_embeddings=1024)
    _, meant = quantized(model, Way({}, by_rows), tmp_path)
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=5, ignore_eos=True)
    options: dict[str, Any] = {"kv_cache_memory": 256 << 20, "max_num_seqs": 20, "deterministic": True}
    answers = []
    for path, more in ((model, {"quantization": "fp8"}), (meant, {})):
        with LLM(str(path), device="cuda", dtype="bfloat16", **options, **more) as llm:
            answers.append([one.outputs for one in llm.generate(prompts_of(20, 500), params, use_tqdm=False)])
    assert answers[0] == answers[1]


@pytest.mark.skipif(torch.cuda.is_available() and not is_hopper(DEVICE), reason="needs a Hopper GPU")
@pytest.mark.parametrize("way", ["blocks", "rows"])
def test_rows_of_eight_bits(way: str, tmp_path: Path) -> None:
    """Log-probabilities of prompts are other ones, and near."""
    stored, _ = models(tmp_path, way)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompts = prompts_of(12, 500)

    def logprobs(**changes: Any) -> torch.Tensor:
        limits: dict[str, Any] = {"kv_cache_memory": 256 << 20, "max_num_seqs": 20, "max_num_batched_tokens": 1024}
        with LLM(str(stored), device="cuda", dtype="bfloat16", **limits, **changes) as llm:
            answers = llm.generate(prompts, params, use_tqdm=False)
        return torch.tensor([
            of_token[token].logprob
            for answer in answers
            for token, of_token in zip(answer.prompt_token_ids, answer.prompt_logprobs, strict=True)
            if of_token is not None
        ])  # fmt: skip

    plain, rounded = logprobs(), logprobs(activation_dtype="fp8")
    assert 0 < (rounded - plain).abs().mean() < 0.1
