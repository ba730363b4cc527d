"""What a profiler saw a GPU run, and what of it is not ours."""

import torch


def launched_kernels(profiler: torch.profiler.profile) -> set[str]:
    """Names of kernels, copies and fills."""
    return {event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA}


def foreign_kernels(names: set[str]) -> list[str]:
    """Those of PyTorch and of the libraries that it brings; NCCL's are not among them."""
    return [
        name
        for name in names
        if "nccl" not in name and ("::" in name or "cublas" in name or "cutlass" in name or "gemm" in name.lower())
    ]
