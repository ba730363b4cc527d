"""Says aloud when a kernel is compiled while requests wait: starting should have compiled every kernel.

One that Triton finds in its cache is loaded when it is first launched, and nothing is said of it.
"""

import sys
from typing import Any

import triton


def warn_of_late_compiles() -> None:
    """From now on each compile of this process is a line on standard error."""

    def warn(*, src: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            what = f"kernel {src.fn.__name__} was compiled while serving, for {src.signature} and {src.constants}"
            print(f"warning: {what}", file=sys.stderr)

    triton.knobs.compilation.listener = warn
