"""On the path of all processes of `make test`: an engine's worker sees one core, and computes in one thread.

It also imports less of torch, as do the ranks that tests start without an engine.
"""

import os
import sys

if "tercet.engine.worker" in sys.orig_argv:
    os.sched_getaffinity = lambda pid: {0}
if any(argument in ("tercet.engine.worker", "-c") or argument.endswith("_rank.py") for argument in sys.orig_argv):
    from lean_torch import import_lean

    import_lean()
