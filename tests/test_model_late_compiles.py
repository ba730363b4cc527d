"""A kernel that is compiled while serving is told, one that is found in Triton's cache is not."""

from pathlib import Path

import pytest
import torch
import triton

from tercet.model.late_compiles import warn_of_late_compiles
from tercet.triton_kernels import silu_and_mul as silu_and_mul_module
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.silu_and_mul import silu_and_mul


@pytest.mark.skipif(INTERPRETED, reason="compiles")
def test_only_compiles_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    kernel = silu_and_mul_module._silu_and_mul_kernel

    def launch() -> None:
        with compiling_for(90) as kernels:
            silu_and_mul(torch.empty(3, 64, dtype=torch.bfloat16, device="meta"))
        assert len(kernels) == 1
        kernel.device_caches.clear()

    kernel.device_caches.clear()
    warn_of_late_compiles()
    launch()
    told = capsys.readouterr().err
    assert told.startswith("warning: kernel _silu_and_mul_kernel was compiled while serving, for {")
    assert told.count("\n") == 1
    launch()
    assert not capsys.readouterr().err
