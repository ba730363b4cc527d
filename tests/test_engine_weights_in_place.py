"""Engines whose workers read other weights where they are: what each layout says then, how ranks and replicas stop at
one place, and that no step is computed with some of these weights and some of those."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from gguf import GGMLQuantizationType
from msgspec.structs import replace

from adapter_folders import make_adapter, merged_model, says
from checkpoints import checkpoint, make_checkpoint, random_prompts, reference_greedy, reference_model
from converted import convert, rounded
from covering import long
from engine_children import children
from guessing_layers import guessing_checkpoint
from mxfp4_checkpoints import in_mxfp4
from quantized_checkpoints import Way, awq, fp8, quantized
from tercet.engine.llm import LLM
from tercet.ipc.client import Client
from tercet.ipc.messages import SamplingParams, Structured
from test_model_rounded_checkpoint import by_rows
from whole_engine import GREEDY, generate, info, tiny_engine, wait_until_empty

PROMPTS = random_prompts(4, 20, 90, seed=11)
NUM_TOKENS = 16
FEW = replace(GREEDY, max_tokens=NUM_TOKENS)
AWQ = Way({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}, awq(32))
FP8 = Way({"quant_method": "fp8", "weight_block_size": [32, 16]}, fp8(32, 16))
Make = Callable[[Path, int], tuple[Path, Path]]
"""Into this folder, with this seed: a model, and the checkpoint with which transformers says the same."""


def plain(family: str) -> Make:
    return lambda folder, seed: (path := make_checkpoint(family, folder, seed), path)


def stored(family: str, way: Way) -> Make:
    return lambda folder, seed: quantized(make_checkpoint(family, folder / "all", seed), way, folder, seed)


def rounded_rows(folder: Path, seed: int) -> tuple[Path, Path]:
    path = make_checkpoint("qwen3", folder / "all", seed)
    return path, quantized(path, Way({}, by_rows), folder)[1]


def in_gguf(folder: Path, seed: int) -> tuple[Path, Path]:
    path, kind = make_checkpoint("llama", folder / "all", seed), GGMLQuantizationType.Q8_0
    return convert(path, folder / "model.gguf", kind), rounded(path, kind, folder / "plain")


def in_four_bits(folder: Path, seed: int) -> tuple[Path, Path]:
    return in_mxfp4(make_checkpoint("gpt-oss", folder / "all", seed), folder)


def guessing(folder: Path, seed: int) -> tuple[Path, Path]:
    path = guessing_checkpoint("qwen3.5-moe", folder, seed)
    return path, path


RANKS, REPLICAS = {"tensor_parallel_size": 2}, {"data_parallel_size": 2}
LAYOUTS: dict[str, tuple[Make, dict[str, Any]]] = {
    "experts, ranks": (plain("qwen3-moe"), RANKS),
    "biases, replicas": (plain("llama-bias-tied"), REPLICAS),
    "latents, both": (plain("deepseek-v3"), {**RANKS, **REPLICAS}),
    "norms everywhere": (plain("gemma3"), {}),
    "multipliers": (plain("granite"), {"deterministic": True}),
    "sinks": (plain("gpt-oss"), RANKS),
    "heads in pairs": (plain("glm4"), RANKS),
    "states": (plain("qwen3.5"), {"kept_states": 4}),
    "Mamba": (plain("nemotron-h"), RANKS),
    "stacked": (plain("phi3"), {"enable_prefix_caching": False}),
    "fp8": (stored("qwen3-moe", FP8), RANKS),
    "rounded": (rounded_rows, {"quantization": "fp8"}),
    "awq": (stored("gemma3", AWQ), {}),
    "mxfp4": (in_four_bits, {}),
    "gguf": (in_gguf, {}),
    "guesses": (guessing, {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}),
    "pages in the host's memory": (plain("qwen3"), {"kv_offloading_size": 4 << 20, "kv_cache_memory": 1 << 20}),
    "states there": (plain("qwen3.5"), {"kv_offloading_size": 4 << 20, "kv_cache_memory": 1 << 19, "kept_states": 1}),
}


@pytest.mark.parametrize("layout", [one if one == "experts, ranks" else long(one) for one in LAYOUTS])
def test_each_says_what_it_would_from_the_start(layout: str, tmp_path: Path) -> None:
    """There and back, by the same workers."""
    make, options = LAYOUTS[layout]
    (first, of_first), (other, of_other) = (make(tmp_path / name, seed) for seed, name in enumerate(("first", "other")))
    with tiny_engine(first, **options) as llm:
        workers = children(llm._engine.process.pid, "worker")
        for path, reference in ((None, of_first), (other, of_other), (first, of_first)):
            if path is not None:
                llm.update_weights(path)
            assert generate(llm, PROMPTS, FEW) == reference_greedy(reference, PROMPTS, NUM_TOKENS)
        assert children(llm._engine.process.pid, "worker") == workers
        wait_until_empty(llm.address)


@pytest.mark.long
def test_adapters_stay(tmp_path: Path) -> None:
    """In their places, that of one that came later, too: they are added to the new weights."""
    first, other = (make_checkpoint("qwen3", tmp_path / str(seed), seed) for seed in range(2))
    folders = {name: make_adapter(tmp_path / name, first, len(name)) for name in ("a", "bb")}
    with tiny_engine(first, adapter=(f"a={folders['a']}",), max_adapters=2, max_adapter_rank=20) as llm:
        workers = children(llm._engine.process.pid, "worker")
        llm.load_adapter("bb", folders["bb"])
        for path in (first, other):
            if path == other:
                llm.update_weights(other)
            for name in (None, *folders):
                model = merged_model(path, folders.get(name or ""))
                answers = generate(llm, PROMPTS, replace(GREEDY, max_tokens=12, adapter=name))
                assert all(says(model, *pair) for pair in zip(PROMPTS, answers, strict=True)), (path, name)
        for name, folder in folders.items():  # none is looked for again
            llm.unload_adapter(name)
            shutil.rmtree(folder)
        llm.update_weights(first)
        assert children(llm._engine.process.pid, "worker") == workers


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {},
        RANKS,
        {**RANKS, **REPLICAS},
        {"deterministic": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=str,
)
async def test_every_token_is_of_the_one_or_of_the_other(options: dict[str, Any], tmp_path: Path) -> None:
    """While weights go to and fro beside streams that go on. A page that is left of others, or a layer, would show."""
    first, other = (make_checkpoint("qwen3", tmp_path / str(seed), seed) for seed in range(2))
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    told: list[tuple[list[int], list[int]]] = []
    with tiny_engine(first, max_num_seqs=6, max_num_batched_tokens=48, kv_cache_memory=1 << 20, **options) as llm:
        workers = children(llm._engine.process.pid, "worker")
        with anyio.fail_after(240):
            async with Client(llm.address) as client, anyio.create_task_group() as tasks:
                ended = anyio.Event()

                async def ask(number: int) -> None:
                    """The same prompts, one after the other; some are left on the way."""
                    while not ended.is_set():
                        prompt = PROMPTS[number % len(PROMPTS)]
                        got: list[int] = []
                        async for piece in client.stream(prompt, params):
                            got += piece.token_ids
                            if number == 5 and len(got) > 20:
                                break
                        told.append((prompt, got))

                async def choose() -> None:
                    """Answers that are held to a form, and await masks."""
                    form = Structured(regex="[a-f]{30}")
                    while not ended.is_set():
                        answer = await client.generate("A tercet", SamplingParams(max_tokens=60, structured=form))
                        assert len(answer.text) == 30
                        assert set(answer.text) <= set("abcdef")

                for number in range(8):
                    tasks.start_soon(ask, number)
                tasks.start_soon(choose)
                for turn in range(10):
                    await anyio.sleep(0.5)
                    await client.update_weights(str((other, first)[turn % 2]), "keep")
                ended.set()
        assert children(llm._engine.process.pid, "worker") == workers
        await anyio.to_thread.run_sync(wait_until_empty, llm.address)
    mixed = 0
    for prompt, answer in told:
        of_each = torch.stack([likeliest(path, prompt, answer) for path in (first, other)])
        right = of_each == torch.tensor(answer)
        assert right.any(0).all()
        mixed += not right.all(1).any()
    assert mixed > 3, "answers are to have tokens of both"


def likeliest(path: Path, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """What would be said in the place of each token."""
    with torch.inference_mode():
        logits = reference_model(path)(torch.tensor([[*prompt, *answer]])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(1)


async def test_plans_go_on_where_they_stopped() -> None:
    """Of workers whose steps others compute: here nobody, and a token is its position."""
    options: dict[str, Any] = {"load_format": "null", "null_step_ms": 2.0, "run_ahead": 3, **RANKS}
    params = SamplingParams(max_tokens=300)
    with tiny_engine("qwen3", **options) as llm, anyio.fail_after(60):
        workers = children(llm._engine.process.pid, "worker")
        async with Client(llm.address) as client, anyio.create_task_group() as tasks:
            answers: list[list[int]] = []

            async def ask(prompt: list[int]) -> None:
                answers.append((await client.generate(prompt, params)).token_ids)

            for number in range(6):
                tasks.start_soon(ask, [5] * (10 + number))
            for _ in range(5):
                await anyio.sleep(0.05)
                await client.update_weights(str(checkpoint("qwen3")), "keep")
            assert not answers
        assert sorted(answer[0] for answer in answers) == list(range(1010, 1016))
        assert all(answer == [*range(answer[0], answer[0] + 300)] for answer in answers)
        assert children(llm._engine.process.pid, "worker") == workers


@pytest.mark.long
def test_weights_that_are_kept_as_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels, in Triton's interpreter: read into the very tensors, as on a GPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "kernels_only"), prepend=":")
    sizes = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 128}
    way = Way({**AWQ.settings, "group_size": 64}, awq(64))
    (first, of_first), (other, of_other) = (
        quantized(make_checkpoint("qwen3", tmp_path / str(seed), seed, **sizes), way, tmp_path / f"in {seed}", seed)
        for seed in range(2)
    )
    prompts, params = random_prompts(2, 5, 12, seed=9), replace(GREEDY, max_tokens=2)
    limits: dict[str, Any] = {"page_size": 16, "kv_cache_memory": 1 << 20, "max_num_batched_tokens": 24}
    with LLM(str(first), device="cpu", dtype="float16", max_num_seqs=4, **limits) as llm:
        workers = children(llm._engine.process.pid, "worker")
        assert generate(llm, prompts, params) == reference_greedy(of_first, prompts, 2)
        llm.update_weights(other)
        assert info(llm.address).weights == str(other)
        assert generate(llm, prompts, params) == reference_greedy(of_other, prompts, 2)
        assert children(llm._engine.process.pid, "worker") == workers
