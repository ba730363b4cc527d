"""Which kernel and which block sizes serve a product: a table measured offline per GPU, and a heuristic elsewhere.

Nothing is measured here, and nothing at run time: `scripts/tune.py` writes `tuned/<GPU name>.json`. Two calls with the
same sizes and bucket of rows always get the same answer, so their bits agree from run to run.
"""

import functools
import json
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path

import torch

from tercet.triton_kernels.dispatch import gpu_name, has_little_shared_memory, is_hopper
from tercet.triton_kernels.matmul_config import PLAIN_ORDER, MatmulConfig
from tercet.triton_kernels.untuned import heuristic

# A product's rows round up to one of these; its kernel is chosen by that alone. 192 are three tiles of 64 rows, or one
# and a half of 128.
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 512, 1024, 2048, 8192)

_LIKE = dict.fromkeys(
    ("NVIDIA H100 80GB HBM3", "NVIDIA H100 NVL", "NVIDIA H800", "NVIDIA GH200 480GB", "NVIDIA GH200 144G HBM3e"),
    "NVIDIA H200",
)
"""Cards with the multiprocessors of another, and less or slower memory. Measured of the first: that table serves it
better than the rule."""


def row_bucket(num_rows: int) -> int:
    """The smallest bucket that holds the rows; the last one beyond it."""
    return ROW_BUCKETS[min(bisect_left(ROW_BUCKETS, num_rows), len(ROW_BUCKETS) - 1)]


def table_key(op: str, N: int, K: int, dtype: torch.dtype, deterministic: bool) -> str:
    """One line of the table: what is computed, on which weights, under which promise."""
    mode = "deterministic" if deterministic else "default"
    return f"{op} {N}x{K} {str(dtype).removeprefix('torch.')} {mode}"


def choose_matmul(
    op: str, num_rows: int, N: int, K: int, dtype: torch.dtype, deterministic: bool, device: torch.device
) -> MatmulConfig:
    """The tuned configuration of `op` (a wrapper's name) for these weights and this many rows, or a sane one."""
    card = gpu_name(device), is_hopper(device), has_little_shared_memory(device)
    return _choose(op, row_bucket(num_rows), N, K, dtype, deterministic, *card)


def choose_matmul_sample(
    num_rows: int, N: int, K: int, dtype: torch.dtype, deterministic: bool, device: torch.device
) -> MatmulConfig:
    """The same for a product that ends in a draw: logits have the bits that `matmul` gives them.

    All kernels of the plain order give the same, so the table may have another for "matmul_sample", for a bucket and no
    other. "apart": the draw reads logits from memory. The kernel in Gluon does not draw: its tiles are taken by the
    kernel next to it, or their logits are read from memory.
    """
    plain = choose_matmul("matmul", num_rows, N, K, dtype, deterministic, device)
    tuned = _tuned(gpu_name(device), "matmul_sample", N, K, dtype, deterministic)
    if not tuned and plain.kernel == "vector":  # one row's logits are soon read again
        return replace(plain, kernel="apart")
    config = tuned.get(row_bucket(num_rows), plain)
    if plain.kernel not in PLAIN_ORDER and config.kernel != "apart":
        return replace(plain, kernel="apart") if plain.kernel == "early" else plain
    return replace(config, kernel="persistent", num_warps=8) if config.kernel == "hopper" else config


@functools.cache
def load_table(gpu: str) -> dict[str, dict[int, MatmulConfig]]:
    """The table of one GPU by name, over that of the one it is like; empty for a GPU that nobody has tuned."""
    path = Path(__file__).parent / "tuned" / f"{gpu.replace(' ', '_')}.json"
    own = read_table(path) if gpu and path.exists() else {}
    return {**load_table(_LIKE[gpu]), **own} if gpu in _LIKE else own


def read_table(path: Path) -> dict[str, dict[int, MatmulConfig]]:
    """What a tuner has written: for each line, a configuration for each bucket."""
    rows = json.loads(path.read_text())["matmul"]
    return {key: {int(m): MatmulConfig(**config) for m, config in buckets.items()} for key, buckets in rows.items()}


@functools.cache
def _choose(
    op: str, bucket: int, N: int, K: int, dtype: torch.dtype, deterministic: bool, gpu: str, hopper: bool, tight: bool
) -> MatmulConfig:  # fmt: skip
    tuned = _tuned(gpu, op, N, K, dtype, deterministic)
    return _of_bucket(tuned, bucket) or heuristic(op, bucket, N, K, dtype, deterministic, hopper, tight)


def _of_bucket(tuned: dict[int, MatmulConfig], bucket: int) -> MatmulConfig | None:
    """The nearest larger bucket serves too."""
    return next((tuned[larger] for larger in sorted(tuned) if larger >= bucket), None)


def _tuned(gpu: str, op: str, N: int, K: int, dtype: torch.dtype, deterministic: bool) -> dict[int, MatmulConfig]:
    """What is measured with a gate at its end only serves without it too."""
    table = load_table(gpu)
    keys = (table_key(which, N, K, dtype, deterministic) for which in (op, f"{op}_silu_and_mul"))
    return next((table[key] for key in keys if key in table), {})
