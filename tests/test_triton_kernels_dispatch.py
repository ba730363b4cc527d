"""Where a tensor's work runs, for tensors without memory too."""

import pytest
import torch

from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED, Gpu, gpu_name, is_hopper, multiprocessors, use_kernels

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles")


def test_tensors_without_memory_are_on_the_gpu_that_is_compiled_for() -> None:
    meta = torch.device("meta")
    x = torch.empty(1, device=meta)
    assert not use_kernels(x)
    for gpu, hopper in ((90, True), (80, False), (Gpu("NVIDIA H200", 90, 114), True)):
        with compiling_for(gpu):
            assert use_kernels(x)
            assert is_hopper(meta) == hopper
            assert gpu_name(meta) == ("" if isinstance(gpu, int) else gpu.name)
            assert multiprocessors(meta) == {90: 132, 80: 108}.get(gpu if isinstance(gpu, int) else 0, 114)
            assert not use_kernels(torch.empty(1))
    assert not is_hopper(meta)
