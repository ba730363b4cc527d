"""A first start on a GPU: what is compiled ahead is what is launched."""

import time
from pathlib import Path

import pytest
import torch

from checkpoints import make_checkpoint
from quantized_checkpoints import LARGE, quantized
from tercet.engine.llm import LLM
from tercet.ipc.messages import SamplingParams
from test_engine_gpu import REAL_HEADS
from test_engine_kept_weights_gpu import WAYS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


_LULL_SECONDS = 8.0
"""For some thirty graphs that a start leaves for lulls: they launch kernels that no other step does."""


@pytest.mark.parametrize("way", [None, "blocks", "packed"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_little_is_left_to_compile(
    deterministic: bool, way: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    sizes = LARGE if way else REAL_HEADS
    model = make_checkpoint("qwen3", tmp_path / "model", **sizes, max_position_embeddings=1024)
    if way:
        model, _ = quantized(model, WAYS[way], tmp_path)
    options = {"dtype": "bfloat16", "deterministic": deterministic, "max_num_seqs": 16, "kv_cache_memory": 256 << 20}
    compiled: list[set[Path]] = []
    for _ in range(2):
        with LLM(str(model), device="cuda", max_num_batched_tokens=1024, **options) as llm:  # type: ignore[arg-type]
            llm.generate([[1, 2, 3], [4] * 100], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
            time.sleep(_LULL_SECONDS)
        compiled.append(set(cache.rglob("*.cubin")))
    first, second = compiled
    assert second == first
    (note,) = cache.glob("tercet-*")
    late = [file for file in first if file.stat().st_mtime > note.stat().st_mtime]
    assert len(first) > 50
    assert len(late) <= len(first) // 10, late
