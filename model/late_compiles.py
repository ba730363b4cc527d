"""Says aloud when a kernel is compiled while requests wait: warming up should have met every kernel."""

import sys
from typing import Any

import triton


def warn_of_late_compiles() -> None:
    """From now on each compile of this process is a line on standard error."""

    def warn(*_: object, **compiled: Any) -> None:
        print(
            f"warning: kernel {compiled['fn'].name} was compiled while serving, for {compiled['key']}", file=sys.stderr
        )

    triton.knobs.runtime.jit_post_compile_hook = warn
