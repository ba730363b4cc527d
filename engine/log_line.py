"""What an operator reads on standard error. It knows nobody who writes there."""

import contextlib
import sys


def log_line(text: str) -> None:
    """Where it cannot be written, the line is lost and nothing else: the disk is full, or whoever read has gone."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)
