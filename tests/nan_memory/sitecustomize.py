"""On the path of an engine's processes: workers find NaN in memory that nobody has written yet.

They also compute in one thread, since threads of tiny products only wait for each other when all cores are taken.
"""

import sys

if "tercet.engine.worker" in sys.orig_argv:
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_num_threads(1)
    torch.set_num_threads = lambda number: None
