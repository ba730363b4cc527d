"""The kernel bench without a GPU: its arithmetic, on a stopwatch that shows what it is told, and its copy, compiled."""

from collections.abc import Callable

import pytest
import torch

import bench_kernels
import ceilings
from kernel_rows import Row
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED


class ToldStopwatch:
    """Each function takes what it returns."""

    def microseconds(self, run: Callable[[int], object], copies: int, nodes: int = 24) -> float:
        return float(run(copies - 1))  # type: ignore[arg-type]


def test_a_row_says_how_far_it_is_from_the_ceiling_and_from_its_peers() -> None:
    card = ceilings.Ceilings(bytes_per_s=4e12, flops_per_s=800e12, copies={})
    row = Row("attention", "B=1", lambda index: 10.0, 3, 20e6, 4e9, lambda index: 12.0, "cuDNN", 15.0, "FA3")
    result = bench_kernels.measure(ToldStopwatch(), row, card)  # type: ignore[arg-type]
    assert result["tb_per_s"] == pytest.approx(2.0)
    assert result["tflop_per_s"] == pytest.approx(400.0)
    assert result["of_ceiling"] == pytest.approx(0.5)
    assert (result["peer_us"], result["times_peer"]) == (12.0, pytest.approx(1.2))
    assert (result["recorded_us"], result["times_recorded"]) == (15.0, pytest.approx(1.5))
    line = bench_kernels.line(result)
    for part in ("attention", "B=1", "10.00 us", "50%", "12.00", "1.20x cuDNN", "15.00", "1.50x FA3"):
        assert part in line
    alone = bench_kernels.measure(ToldStopwatch(), Row("norm", "T=1", lambda index: 10.0, 1, 20e6), card)  # type: ignore[arg-type]
    assert alone["bound"] == "memory"
    assert alone["times_peer"] is alone["times_recorded"] is None
    assert bench_kernels.line(alone).endswith("50%")


@pytest.mark.skipif(INTERPRETED, reason="compiles")
def test_the_copy_moves_16_bytes_a_thread() -> None:
    numbers = torch.empty(2**20, dtype=torch.bfloat16, device="meta")
    with compiling_for(90) as kernels:
        ceilings._copier(numbers, numbers, 4096, 8)(0)
    (kernel,) = kernels
    assert "ld.global.v4" in kernel.asm["ptx"]
    assert "st.global.v4" in kernel.asm["ptx"]
