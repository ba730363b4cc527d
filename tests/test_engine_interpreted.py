"""The whole engine with every kernel in Triton's interpreter: real processes, greedy tokens equal to transformers'.

Tiny models, in fp32 but for those with weights kept as stored: an interpreted program takes about a millisecond.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file

from checkpoints import make_checkpoint, random_prompts, reference_greedy
from covering import long
from fp8_cache import fp8_greedy
from quantized_checkpoints import QUANTIZED, Way, awq, fp8, quantized
from tercet.engine import llm as module
from tercet.engine.engine_process import EngineProcess
from tercet.engine.llm import LLM
from tercet.ipc.messages import SamplingParams
from tercet.ipc.process_messages import Progress
from whole_engine import PAGE_SIZE, generate, wait_until_empty

NUM_TOKENS = 4
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(autouse=True)
def _kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "kernels_only"), prepend=os.pathsep)


@pytest.mark.parametrize(
    ("family", "num_layers", "options"),
    [
        ("qwen3", 1, {}),
        long("mistral", 1, {"deterministic": True}),
        long("qwen3", 1, {"kv_cache_dtype": "fp8"}),
        long("youtu", 1, {}),
        long("minicpm3", 1, {"deterministic": True}),
        long("youtu", 1, {"kv_cache_dtype": "fp8"}),
    ],
)
def test_greedy_is_transformers(family: str, num_layers: int, options: dict[str, Any], tmp_path: Path) -> None:
    model = make_checkpoint(family, tmp_path, num_hidden_layers=num_layers)
    prompts = [prompt[:length] for prompt, length in zip(random_prompts(3, 60, 60, seed=8), (35, 17, 3), strict=True)]
    answers = (fp8_greedy if "kv_cache_dtype" in options else reference_greedy)(model, prompts, NUM_TOKENS)
    assert len({token for answer in answers for token in answer}) > NUM_TOKENS
    with LLM(
        str(model),
        device="cpu",
        page_size=PAGE_SIZE,
        kv_cache_memory=1 << 20,
        max_num_batched_tokens=24,  # the longest prompt takes two chunks, the second beside others
        max_num_seqs=4,
        **options,
    ) as llm:
        assert generate(llm, prompts, GREEDY) == answers
        # Again, from the prefix cache: a chunk that starts in the middle of a sequence; and once more on a copied page.
        (output,) = llm.generate(prompts[:1], replace(GREEDY, n=2), use_tqdm=False)
        assert [one.token_ids for one in output.outputs] == answers[:1] * 2
        wait_until_empty(llm.address)


FP8 = Way({"quant_method": "fp8", "weight_block_size": [48, 64]}, fp8(48, 64))
AWQ = Way({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, awq(64))
LATENTS = {"hidden_size": 128, "q_lora_rank": 128, "kv_lora_rank": 64, "v_head_dim": 32}


@pytest.mark.parametrize(
    ("family", "way", "sizes", "num_bytes"),
    [
        long("qwen3", FP8, {}, 1 + 4 / 64),
        ("qwen3", AWQ, {"hidden_size": 128}, 1 / 2 + 4 / 64),
        long("youtu", AWQ, LATENTS, 1 / 2 + 4 / 64),
        long("youtu", FP8, LATENTS, 1 + 4 / 64),
    ],
)
def test_weights_are_kept_as_stored(
    family: str, way: Way, sizes: dict[str, int], num_bytes: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And answers are those of the numbers that they stand for: in fp16, of which products read them so. But matrices
    of each head's own are plain."""
    model = make_checkpoint(family, tmp_path / "model", num_hidden_layers=1, intermediate_size=128, **sizes)
    stored, plain = quantized(model, way, tmp_path)
    prompts, told = random_prompts(2, 5, 12, seed=9), list[Progress]()
    monkeypatch.setattr(module, "EngineProcess", lambda config: EngineProcess(config, told.append))
    limits = {"page_size": PAGE_SIZE, "kv_cache_memory": 1 << 20, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    with LLM(str(stored), device="cpu", dtype="float16", **limits) as llm:  # type: ignore[arg-type]
        assert generate(llm, prompts, replace(GREEDY, max_tokens=2)) == reference_greedy(plain, prompts, 2)
    tensors = load_file(plain / "model.safetensors")
    kept = {name for name in tensors if name.endswith(QUANTIZED) and "kv_b_proj" not in name}
    total = sum(tensor.numel() * (num_bytes if name in kept else 2) for name, tensor in tensors.items())
    assert {one.total for one in told if one.what == "bytes of weights"} == {total}
