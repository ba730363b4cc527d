"""On the path of all processes of `make test`: an engine's worker sees one core, and computes in one thread.

It also imports less of torch, as do the ranks that tests start without an engine.
"""

import os
import sys

if "tercet.engine.worker" in sys.orig_argv:
    os.sched_getaffinity = lambda pid: {0}
_RANK = "_rank.py"
_names = [os.path.basename(argument) for argument in sys.orig_argv]
if any(name in ("tercet.engine.worker", "-c") or (name.endswith(_RANK) and name[:5] != "test_") for name in _names):
    from lean_torch import import_lean

    import_lean()
