"""What products are served with that no table has: always something that can do them, and no card left idle."""

import json
import random
from itertools import product
from pathlib import Path

import pytest
import torch

from tercet.triton_kernels import tuning
from tercet.triton_kernels.matmul_config import KERNELS, PLAIN_ORDER, MatmulConfig
from tercet.triton_kernels.matmul_launch import can_divide, fits_early
from tercet.triton_kernels.tuning import ROW_BUCKETS, choose_matmul, choose_matmul_sample
from tercet.triton_kernels.untuned import heuristic

OPS = ("matmul", "matmul_add", "matmul_silu_and_mul", "rms_norm_matmul", "rms_norm_matmul_silu_and_mul")
MULTIPROCESSORS = 132


def random_sizes() -> tuple[int, int]:
    """Of weights: most as models have them, some odd."""
    if random.random() < 0.2:
        return random.randint(1, 5000), random.randint(1, 5000)
    return 32 * random.randint(1, 1200), 64 * random.randint(1, 300)


@pytest.mark.parametrize("bucket", ROW_BUCKETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_any_product_is_served_by_what_can_do_it(bucket: int, dtype: torch.dtype) -> None:
    for op, hopper, deterministic, _ in product(OPS, (True, False), (True, False), range(8)):
        N, K = random_sizes()
        config = heuristic(op, bucket, N, K, dtype, deterministic, hopper)
        assert config == heuristic(op, bucket, N, K, dtype, deterministic, hopper)
        if config.kernel == "apart":
            assert op.startswith("rms_norm_")
            continue
        assert config.kernel in (PLAIN_ORDER if deterministic else KERNELS)
        assert config.kernel != "vector" or bucket == 1
        assert config.kernel != "early" or (hopper and fits_early(config, bucket, N, K, config.parts))
        assert config.kernel not in ("wave", "hopper") or (hopper and dtype != torch.float32)
        assert config.parts == 1 or (op == "matmul_add" and not deterministic and can_divide(config, K))


def busiest(config: MatmulConfig, num_rows: int, N: int) -> float:
    """What the busiest multiprocessor has to do, as a multiple of what it would be if all had the same."""
    tiles = -(-num_rows // config.height) * -(-N // config.width) * config.parts
    rounds = -(-tiles // MULTIPROCESSORS)
    return rounds * config.height * config.width / config.parts / (num_rows * N / MULTIPROCESSORS)


@pytest.mark.parametrize("num_rows", [64, 128, 192, 256, 512, 1024])
def test_multiprocessors_have_about_the_same_to_do(num_rows: int) -> None:
    """Whatever the width: with tiles of one size some take nearly twice as long as they should, narrow ones longer."""
    wide, narrow = range(8448, 40_960, 128), range(1024, 8448, 32)
    for op, widths, most in (("matmul", wide, 1.5), ("matmul_add", wide, 1.5), ("matmul_add", narrow, 2.2)):
        chosen = {N: heuristic(op, num_rows, N, 4096, torch.bfloat16, False, True) for N in widths}
        assert max(busiest(config, num_rows, N) for N, config in chosen.items()) < most


def test_a_card_like_another_has_its_table_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = tuning.load_table("NVIDIA H200")
    assert tuning.load_table("NVIDIA H100 80GB HBM3") == h200 != {}
    assert tuning.load_table("NVIDIA H20") == tuning.load_table("NVIDIA L4") == {}
    tiles = [{"kernel": "tile", "block_m": size, "block_n": 64, "block_k": 64, "num_warps": 4} for size in (32, 64)]
    tmp_path.joinpath("tuned").mkdir()
    for card, lines in (("H200", {"a": {"1": tiles[0]}, "b": {"1": tiles[0]}}), ("H800", {"b": {"2": tiles[1]}})):
        tmp_path.joinpath("tuned", f"NVIDIA_{card}.json").write_text(json.dumps({"matmul": lines}))
    monkeypatch.setattr(tuning, "__file__", str(tmp_path / "tuning.py"))
    tuning.load_table.cache_clear()
    try:
        own = tuning.load_table("NVIDIA H800")
    finally:
        tuning.load_table.cache_clear()
    assert own == {"a": {1: MatmulConfig(**tiles[0])}, "b": {2: MatmulConfig(**tiles[1])}}  # type: ignore[arg-type]


def test_a_table_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    line = tuning.table_key("matmul", 512, 512, torch.bfloat16, False)
    tuned = MatmulConfig("tile", 64, 64, 64, 4)
    monkeypatch.setattr(tuning, "gpu_name", lambda device: device)
    monkeypatch.setattr(tuning, "is_hopper", lambda device: True)
    monkeypatch.setattr(tuning, "has_little_shared_memory", lambda device: False)
    monkeypatch.setattr(tuning, "load_table", {"a card": {line: {64: tuned}}, "another": {}}.__getitem__)
    for card, N, rows in product(("a card", "another"), (512, 520), (1, 64, 65)):
        chosen = choose_matmul("matmul", rows, N, 512, torch.bfloat16, False, card)  # type: ignore[arg-type]
        bucket = tuning.row_bucket(rows)
        rule = heuristic("matmul", bucket, N, 512, torch.bfloat16, False, True)
        assert chosen == (tuned if (card, N) == ("a card", 512) and rows <= 64 else rule)
        draws = choose_matmul_sample(rows, N, 512, torch.bfloat16, False, card)  # type: ignore[arg-type]
        assert (draws.block_m, draws.block_n) == (chosen.block_m, chosen.block_n)
