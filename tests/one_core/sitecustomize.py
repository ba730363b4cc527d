"""On the path of all processes of `make test`: an engine's worker sees one core, and computes in one thread."""

import os
import sys

if "tercet.engine.worker" in sys.orig_argv:
    os.sched_getaffinity = lambda pid: {0}
