"""Norm, product and draw in one kernel say what the draw from logits in memory says, to the bit, in every kernel."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from covering import long
from interpreted import rerun_interpreted
from slot_tables import random_table
from tercet.triton_kernels import matmul_sample, sample_shard, tuning
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.matmul import rms_norm_matmul
from tercet.triton_kernels.matmul_config import PLAIN_ORDER, MatmulConfig
from tercet.triton_kernels.matmul_launch import launch_matmul
from tercet.triton_kernels.matmul_sample import rms_norm_matmul_sample
from tercet.triton_kernels.sample import TokenRing, sample
from tercet.triton_kernels.sample_shard import VocabShard
from tercet.triton_kernels.slot_table import SlotTable
from tercet.triton_kernels.tuning import choose_matmul, choose_matmul_sample

INTS, CPU = torch.int32, torch.device("cpu")
EPS = 1e-5
TUNED = sorted(path.stem for path in Path(tuning.__file__).parent.glob("tuned/*.json"))
interpreted = pytest.mark.skipif(not INTERPRETED, reason="the kernels, in the interpreter")
CONFIGS = [
    MatmulConfig("vector", 1, 4, 64, 4),
    MatmulConfig("vector", 1, 2, 32, 4),
    MatmulConfig("split", 8, 16, 32, 4, splits=2),
    MatmulConfig("skinny", 16, 32, 32, 1),
    MatmulConfig("tile", 16, 32, 32, 4, group_m=2),
    MatmulConfig("persistent", 16, 64, 32, 4, group_m=2),
    MatmulConfig("wave", 32, 64, 32, 4),
    MatmulConfig("wave", 32, 64, 32, 4, extra=True),
    MatmulConfig("wave", 32, 64, 32, 4, extra=True, tall=True),
]


def copy_of(table: SlotTable) -> SlotTable:
    return SlotTable(**{field.name: getattr(table, field.name).clone() for field in fields(SlotTable)})


def assert_same(got: SlotTable, wanted: SlotTable) -> None:
    for field in fields(SlotTable):
        assert torch.equal(getattr(got, field.name), getattr(wanted, field.name)), field.name


def mixed_rows(rows: int, vocab: int, device: str = "cpu") -> tuple[Tensor, Tensor, SlotTable]:
    """Slots, positions and table of rows of every kind: greedy, drawn, padding, with banned stop ids, of no slot."""
    table = random_table(rows + 2, 4, 16, vocab, seed=int(torch.randint(2**31, ())))
    table.temperature_S[:] = torch.where(torch.rand(rows + 2) < 0.4, 0.0, torch.rand(rows + 2) * 2)
    slots = torch.randperm(rows).int()
    positions = table.length_S[slots.long()].clamp(max=62)
    table.length_S[slots.long()] = positions
    table.stop_ids_SE[:, :4] = torch.randint(0, vocab, (rows + 2, 4)).int()
    table.min_length_S[slots[::3].long()] = 63
    if rows > 4:
        positions[3] = -1
        slots[4] = rows + 2
    table = SlotTable(**{field.name: getattr(table, field.name).to(device) for field in fields(SlotTable)})
    return slots.to(device), positions.to(device), table


def draw(run: Callable[[TokenRing], None], rows: int, device: str = "cpu") -> Tensor:
    """The tokens that a step leaves in the next place of the ring, and nothing elsewhere."""
    ring = TokenRing(torch.full((2, rows), -9, dtype=INTS, device=device), torch.zeros(1, dtype=INTS, device=device))
    run(ring)
    assert ring.turn_1.item() == 1
    assert (ring.places_KR[0] == -9).all()
    return ring.places_KR[1]


@interpreted
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.kernel}{c.height}x{c.width}")
def test_kernels(config: MatmulConfig) -> None:
    """With ties, some by rounding alone, padding that is the best of all, and logits infinite or no numbers."""
    few, many = (1, 1) if config.kernel == "vector" else (7, 50)
    for rows, vocab, padding, K, dtype in ((few, 61, 3, 40, torch.float32), (many, 97, 63, 32, torch.float16)):
        x, w = torch.randn(rows, K).to(dtype), (torch.randn(vocab + padding, K) * 3 * K**-0.5).to(dtype)
        x[-1] = 0
        x[-1, :2] = 1
        w[10, :2], w[20, :2] = torch.tensor([30.0, 0.0]), torch.tensor([30.0, 0.001])  # alike once they are rounded
        w[vocab:] = x[0] * 50
        w[vocab // 2 :: vocab // 3] = w[5]
        if rows > 1:
            x[1] = 0
            x[2] = float("nan")
            x[6] = float("inf")
        slots, positions, table = mixed_rows(rows, vocab)
        if torch.rand(()) < 0.5:
            table.temperature_S.zero_()
        table.temperature_S[slots[-1].long()] = 0
        apart, together = copy_of(table), copy_of(table)
        logits = torch.empty(rows, vocab + padding, dtype=dtype)
        launch_matmul(config, x, w, logits)
        wanted = sample(logits[:, :vocab], slots, positions, apart)
        shard = VocabShard(0, vocab, None)
        got = draw(
            lambda ring, c=config, x=x, w=w, s=slots, p=positions, t=together, shard=shard: matmul_sample.draw_into(
                c, ring, x, w, s, p, t, shard
            ),
            rows,
        )
        assert got.tolist() == wanted.tolist(), rows
        assert_same(together, apart)


def check_wrapper(
    rows: int, vocab: int, padded: int, K: int, dtype: torch.dtype, deterministic: bool, device: str = "cpu"
) -> None:
    """One rank with all columns, and two with a half each: all say what the draw from logits in memory says."""
    x = torch.randn(rows, K).to(device, dtype)
    w, norm = torch.randn(padded, K, device=device).mul_(3 * K**-0.5).to(dtype), torch.rand(K).to(device, dtype)
    slots, positions, table = mixed_rows(rows, vocab, device)
    apart = copy_of(table)
    logits = rms_norm_matmul(x, norm, EPS, w, deterministic=deterministic)
    wanted = sample(logits[:, :vocab], slots, positions, apart)

    def run(w: Tensor, shard: VocabShard, table: SlotTable) -> Tensor:
        return draw(
            lambda ring: rms_norm_matmul_sample(
                ring, x, norm, EPS, w, slots, positions, table, shard, deterministic=deterministic
            ),
            rows,
            device,
        )

    together = copy_of(table)
    assert run(w, VocabShard(0, vocab, None), together).tolist() == wanted.tolist()
    assert_same(together, apart)
    said: list[Tensor] = []

    def listen(best: Tensor) -> Tensor:
        said.append(best.clone())
        return torch.stack([best, best])

    half = padded // 2
    for rank in range(2):
        run(w[rank * half : (rank + 1) * half], VocabShard(rank * half, vocab, listen), copy_of(table))
    halves = torch.cat([rms_norm_matmul(x, norm, EPS, part, deterministic=deterministic) for part in w.split(half)], 1)
    apart = copy_of(table)
    wanted = sample(halves[:, :vocab], slots, positions, apart)
    together = copy_of(table)
    last = VocabShard(half, vocab, lambda best: torch.stack([said[0], best]))
    assert run(w[half:], last, together).tolist() == wanted.tolist()
    assert_same(together, apart)


@interpreted
@pytest.mark.parametrize(("rows", "deterministic"), [(1, False), (1, True), (5, False), (20, True), long(66, False)])
def test_wrapper(rows: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if rows < 20:  # so many tiles that they are compared in two kernels
        monkeypatch.setattr(sample_shard, "_MOST_TILES", 4)
        monkeypatch.setattr(sample_shard, "_PART", 2)
    check_wrapper(rows, 83, 92, 40, torch.float32, deterministic)


@interpreted
def test_apart_where_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_sample, "choose_matmul_sample", lambda *_: MatmulConfig("apart", 0, 0, 0, 0))
    check_wrapper(20, 83, 92, 40, torch.float32, False)


@pytest.mark.parametrize(("gpu", "hopper"), [("", False), ("", True), *((gpu, True) for gpu in TUNED)])
def test_the_draw_takes_kernels_with_the_bits_of_the_product(
    gpu: str, hopper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each kind of GPU: the same kernel, another of the plain order, or the product itself, read from memory."""
    monkeypatch.setattr(tuning, "gpu_name", lambda device: gpu)
    monkeypatch.setattr(tuning, "is_hopper", lambda device: hopper)
    products: set[str] = set()
    for rows in (1, 8, 64, 128, 256, 8192):
        for deterministic in (False, True):
            plain = choose_matmul("matmul", rows, 151936, 1024, torch.bfloat16, deterministic, CPU)
            config = choose_matmul_sample(rows, 151936, 1024, torch.bfloat16, deterministic, CPU)
            products.add(plain.kernel)
            assert config.kernel not in ("hopper", "early")  # which cannot draw
            if config.kernel != "apart":
                assert config == plain or {config.kernel, plain.kernel} <= set(PLAIN_ORDER)
    assert ("hopper" in products) == hopper
    assert not products <= set(PLAIN_ORDER)


def test_a_draw_tuned_for_a_bucket_serves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many, drawing = (MatmulConfig("wave", size, 64, 64, 4) for size in (64, 128, 256))
    apart = MatmulConfig("apart", 0, 0, 0, 0)
    lines = {"matmul": {64: few, 256: many}, "matmul_sample": {1: apart, 192: drawing}}
    table = {tuning.table_key(op, 999, 512, torch.bfloat16, True): buckets for op, buckets in lines.items()}
    monkeypatch.setattr(tuning, "gpu_name", lambda device: "a card")
    monkeypatch.setattr(tuning, "is_hopper", lambda device: True)
    monkeypatch.setattr(tuning, "load_table", lambda gpu: table)
    chosen = [choose_matmul_sample(rows, 999, 512, torch.bfloat16, True, CPU) for rows in (1, 2, 64, 100, 192, 193)]
    assert chosen == [apart, few, few, many, drawing, many]


def test_wrong_arguments_are_refused() -> None:
    slots, positions, table = mixed_rows(2, 50)
    ring = TokenRing(torch.zeros(2, 2, dtype=INTS), torch.zeros(1, dtype=INTS))
    shard, norm = VocabShard(0, 50, None), torch.ones(8)
    with pytest.raises(ValueError, match=r"w: got shape \[50, 9\], wanted \[\*, 8\]"):
        rms_norm_matmul_sample(ring, torch.zeros(2, 8), norm, EPS, torch.zeros(50, 9), slots, positions, table, shard)
    with pytest.raises(ValueError, match=r"slots: got shape \[1\], wanted \[2\]"):
        rms_norm_matmul_sample(
            ring, torch.zeros(2, 8), norm, EPS, torch.zeros(50, 8), slots[:1], positions, table, shard
        )


def test_interpreted() -> None:
    rerun_interpreted(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("K", [1024, 4096])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 13, 32, 64, 100, 200, 300])
def test_gpu(rows: int, deterministic: bool, K: int) -> None:
    check_wrapper(rows, 151936 - 267, 151936, K, torch.bfloat16, deterministic, "cuda")
