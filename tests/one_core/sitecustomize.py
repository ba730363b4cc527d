"""On the path of all processes of `make test`: an engine's worker sees one core, and computes in one thread."""

import os
import sys

from quick_start import quicken_start

quicken_start()
if "tercet.engine.worker" in sys.orig_argv:
    os.sched_getaffinity = lambda pid: {0}
