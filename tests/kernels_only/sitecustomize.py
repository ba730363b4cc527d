"""On the path of an engine whose workers run the kernels in Triton's interpreter: no reference may step in for one.

As in `nan_memory`, workers find NaN in memory that nobody has written yet, and compute in one thread. Kernels must
keep to the tensors that they are given.
"""

import gc
import sys
from pathlib import Path

if "tercet.engine.worker" in sys.orig_argv:
    sys.path.append(str(Path(__file__).parents[1] / "one_core"))
    from lean_torch import import_lean

    import_lean()
    gc.disable()  # as the worker does, before it imports torch
    import torch
    import torch.nn.functional as F

    # Not `torch.use_deterministic_algorithms`, which imports a compiler for this and takes as long as torch itself.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_num_threads(1)
    torch.set_num_threads = lambda number: None

    def refuse(*args, **kwargs):
        raise AssertionError("PyTorch computes what a kernel should")

    # What the references of embedding, norm, product, attention and sampling are made of.
    F.embedding = F.rms_norm = F.linear = F.scaled_dot_product_attention = refuse
    torch.Tensor.addmm_ = torch.Tensor.argmax = torch.Tensor.softmax = refuse

    sys.path.append(str(Path(__file__).parents[1]))
    from bounds import check_bounds
    from interpreted_fp8 import convert_rightly
    from quick_interpreter import quicken

    check_bounds()
    convert_rightly()
    quicken()
