"""On the path of all processes of `make test`, whose two runs have a core each: a worker computes in one thread.

Threads of tiny products only wait for each other, and while they do, they keep from their cores who has work.
"""

import os
import sys

if "tercet.engine.worker" in sys.orig_argv:
    os.sched_getaffinity = lambda pid: {0}
