"""Thresholds of top-k, top-p and min-p among candidates and, where these are too few, among all, against float64."""

import pytest
import torch
from torch import Tensor

from covering import long
from interpreted import rerun_interpreted
from slot_tables import random_table
from tercet.triton_kernels.allowed import launch_thresholds
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.slot_table import SlotTable

INTS, FP32, FP16 = torch.int32, torch.float32, torch.float16
VOCAB, TEMPERATURE = 20_000, 0.7


def logits_of_all_kinds(dtype: torch.dtype) -> Tensor:
    """In rows that lie apart, with NaN between them."""
    logits = torch.randn(8, VOCAB + 5, generator=torch.Generator().manual_seed(3)) * 3
    logits[1] *= 0.02  # everything is about as likely
    logits[2] = 1.5
    logits[3, ::2] = logits[3].max()  # more equal ones than a part has room for
    logits[4, 7:] = float("-inf")
    logits[5, 9000:9300] += 20.0  # all in one part
    logits[6] = float("-inf")
    logits[6, VOCAB - 1] = -5.0
    logits[7, :50] = float("nan")
    logits[:, VOCAB:] = float("nan")
    return logits.to(dtype)[:, :VOCAB]


def on(device: str, table: SlotTable) -> SlotTable:
    return SlotTable(**{name: getattr(table, name).to(device) for name in SlotTable.__dataclass_fields__})


@pytest.fixture(params=["interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "interpreted":
        if not INTERPRETED:
            pytest.skip("kernels")
        return "cpu"
    if INTERPRETED or not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return "cuda"


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "dtype"),
    [
        (*limits, dtype) if dtype == in_short else long(*limits, dtype)
        for limits, in_short in {
            (1, 1, 0): FP16, (20, 0.95, 0): FP32, (3000, 1, 0): FP16, (0, 0.9, 0): FP32,
            (0, 0.9999, 0): FP16, (0, 1, 0.1): FP32, (5000, 0.5, 0): FP32, (19_999, 1, 0): FP32,
        }.items()
        for dtype in (FP32, FP16, torch.bfloat16)
    ],
)  # fmt: skip
def test_no_token_too_many_and_none_too_few(
    device: str, top_k: int, top_p: float, min_p: float, dtype: torch.dtype
) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter does not know its numbers")
    logits, table = logits_of_all_kinds(dtype), random_table(9, 4, 16, VOCAB, 0)
    table.temperature_S[:], table.top_k_S[:], table.top_p_S[:], table.min_p_S[:] = TEMPERATURE, top_k, top_p, min_p
    slots, positions = torch.arange(8, dtype=INTS), table.length_S[:8].clone()
    on_device = logits.to(device), slots.to(device), positions.to(device), on(device, table)
    thresholds = launch_thresholds(*on_device, smallest_temperature=1e-5).cpu()
    for row in range(8):
        bits = logits[row].float().view(INTS)
        allowed = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >= thresholds[row]
        x = logits[row].double().nan_to_num(float("-inf"))
        possible = x > float("-inf")
        allowed &= possible
        least = x[allowed].min()
        assert not (x[~allowed] >= least).any(), "a threshold"
        of_k = possible & (x >= x.sort(descending=True).values[top_k - 1]) if top_k else possible
        weight = torch.where(of_k, ((x - x.max()) / TEMPERATURE).exp(), 0.0)
        weight /= weight.sum()
        if top_p < 1:
            assert bool((of_k | ~allowed).all())
            assert float(weight[x > least].sum()) < top_p + 1e-5
            assert float(weight[allowed].sum()) >= top_p - 1e-5
        else:
            assert torch.equal(allowed, of_k & (weight >= min_p * weight.max()))


def test_rows_without_limits_allow_everything(device: str) -> None:
    logits, table = logits_of_all_kinds(torch.float32), random_table(9, 4, 16, VOCAB, 0)
    table.temperature_S[:] = 1.0
    table.top_k_S[:2] = torch.tensor([VOCAB, VOCAB + 9], dtype=INTS)
    table.temperature_S[2], table.top_k_S[2] = 0.0, 5
    table.top_k_S[3] = 5
    slots = torch.tensor([0, 1, 2, 3, 4, 9, -1, 3], dtype=INTS)
    positions = torch.tensor([5, 5, 5, 5, 5, 5, 5, -1], dtype=INTS)
    on_device = logits.to(device), slots.to(device), positions.to(device), on(device, table)
    thresholds = launch_thresholds(*on_device, smallest_temperature=1e-5).tolist()
    assert thresholds[3] > -(2**31)
    assert thresholds[:3] + thresholds[4:] == [-(2**31)] * 7


def test_interpreted() -> None:
    rerun_interpreted(__file__)
