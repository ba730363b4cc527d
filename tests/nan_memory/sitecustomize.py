"""On the path of an engine's processes: workers find NaN in memory that nobody has written yet.

They also compute in one thread, since threads of tiny products only wait for each other when all cores are taken.
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

    # Not `torch.use_deterministic_algorithms`, which imports a compiler for this and takes as long as torch itself.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_num_threads(1)
    torch.set_num_threads = lambda number: None
