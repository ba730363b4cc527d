"""Changes on a GPU: memory that is free while an engine sleeps, weights and adapters that come while graphs stay."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adapter_folders import make_adapter, merged_model, says
from checkpoints import checkpoint, make_checkpoint, random_prompts, reference_model
from engine_children import children
from guessing_layers import guessing_checkpoint
from mxfp4_checkpoints import in_mxfp4
from tercet.engine.llm import LLM
from tercet.ipc.messages import SamplingParams
from whole_engine import generate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = {"kv_cache_memory": 256 << 20, "max_num_seqs": 24, "max_num_batched_tokens": 512, "dtype": "float32"}
PROMPTS = random_prompts(24, 1, 300, seed=2)
LOGGED = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)


def asked(name: str | None = None) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, adapter=name)


def used_mib() -> list[int]:
    """Of each card; nobody else may use them meanwhile."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.check_output(query, text=True).splitlines()]


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"tensor_parallel_size": 2}], ids=str)
def test_memory_is_free_and_other_weights_say_other_things(options: dict[str, Any], tmp_path: Path) -> None:
    if torch.cuda.device_count() < options.get("tensor_parallel_size", 1):
        pytest.skip("needs two CUDA devices")
    first, other = checkpoint("qwen3"), make_checkpoint("qwen3", tmp_path / "other", seed=1)
    before = used_mib()
    with LLM(str(first), device="cuda", **options, **SIZES) as llm:
        serving = used_mib()
        assert sum(serving) > sum(before) + 300
        for change, folder in (
            (lambda: None, first),
            (lambda: (llm.sleep(), check_free(before), llm.wake_up()), first),
            (lambda: llm.update_weights(other), other),
            (lambda: (llm.sleep(mode="abort"), llm.wake_up(first)), first),
        ):
            change()
            answers = generate(llm, PROMPTS, asked())
            assert all(map(says, [reference_model(folder)] * len(PROMPTS), PROMPTS, answers))


KEPT: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}
TWO_GUESSES = {"method": "mtp", "num_speculative_tokens": 2}
Make = Callable[[Path, int], Path]


def plain(family: str, **sizes: Any) -> Make:
    return lambda folder, seed: make_checkpoint(family, folder, seed, **sizes)


def guessing(folder: Path, seed: int) -> Path:
    return guessing_checkpoint("glm4-moe", folder, seed)


def in_four_bits(folder: Path, seed: int) -> Path:
    return in_mxfp4(make_checkpoint("gpt-oss", folder / "all", seed), folder)[0]


LAYOUTS: dict[str, tuple[Make, dict[str, Any]]] = {
    "plain": (plain("qwen3"), {}),
    "eager": (plain("gemma3"), {"enforce_eager": True}),
    "ranks": (plain("qwen3-moe"), {"tensor_parallel_size": 2}),
    "replicas": (plain("granite"), {"data_parallel_size": 2}),
    "latents": (plain("deepseek-v3"), {"deterministic": True}),
    "states": (plain("qwen3.5", linear_key_head_dim=128, linear_value_head_dim=128), {}),
    "guesses": (guessing, {"speculative_config": TWO_GUESSES, "deterministic": True}),
    "rounded": (plain("qwen3", **KEPT), {"quantization": "fp8"}),
    "rounded experts": (plain("qwen3-moe", **KEPT, moe_intermediate_size=256), {"quantization": "fp8"}),
    "rounded rows": (plain("qwen3", **KEPT), {"quantization": "fp8", "activation_dtype": "fp8"}),
    "mxfp4": (in_four_bits, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_read_in_place(layout: str, tmp_path: Path) -> None:
    """There and back, while graphs stay: to the bit what an engine says that has them from the start."""
    make, options = LAYOUTS[layout]
    gpus = options.get("tensor_parallel_size", 1) * options.get("data_parallel_size", 1)
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} CUDA devices")
    if "activation_dtype" in options and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    folders = [make(tmp_path / str(seed), seed) for seed in range(2)]
    settings = {**SIZES, "dtype": "bfloat16", "device": "cuda", **options}

    def said(llm: LLM) -> Any:
        """One after the other: in a batch, bits are those of its size."""
        outputs = [llm.generate([prompt], LOGGED, use_tqdm=False)[0].outputs[0] for prompt in PROMPTS[:4]]
        return [(output.token_ids, output.logprobs) for output in outputs]

    wanted = []
    for folder in folders:
        with LLM(str(folder), **settings) as llm:
            wanted.append(said(llm))
    assert wanted[0] != wanted[1]
    with LLM(str(folders[0]), **settings) as llm:
        assert said(llm) == wanted[0]
        workers, used = children(llm._engine.process.pid, "worker"), used_mib()
        for turn in (1, 0, 1):
            llm.update_weights(folders[turn])
            assert said(llm) == wanted[turn]
        assert children(llm._engine.process.pid, "worker") == workers
        assert sum(used_mib()) <= sum(used) + 32


def check_free(before: list[int]) -> None:
    assert sum(used_mib()) <= sum(before) + 32


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "qwen3-moe", "qwen3.5"])
@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"tensor_parallel_size": 2}], ids=str)
def test_adapters_come_and_go(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Beside each other and none, thrice in the same places."""
    if torch.cuda.device_count() < options.get("tensor_parallel_size", 1):
        pytest.skip("needs two CUDA devices")
    of_states = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    path = make_checkpoint(family, tmp_path / "model", **of_states) if family == "qwen3.5" else checkpoint(family)
    places: dict[str, Any] = {"max_adapters": 2, "max_adapter_rank": 20}
    with LLM(str(path), device="cuda", **places, **options, **SIZES) as llm:
        for turn in range(3):
            folders = {
                name: make_adapter(tmp_path / f"{name}{turn}", path, 7 * turn + len(name)) for name in ("a", "bb")
            }
            for name, folder in folders.items():
                llm.load_adapter(name, folder)
            names = [(None, "a", "bb")[index % 3] for index in range(len(PROMPTS))]
            answers = generate(llm, PROMPTS, [asked(name) for name in names])
            models = {name: merged_model(path, folders.get(name or "")) for name in (None, "a", "bb")}
            for name, prompt, answer in zip(names, PROMPTS, answers, strict=True):
                assert says(models[name], prompt, answer), (turn, name)
            for name in folders:
                llm.unload_adapter(name)
