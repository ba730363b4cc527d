"""Standard input, output and error of a process that was started without them. It knows nobody who uses them."""

import os
import sys


def open_standard_files() -> None:
    """Have those that are closed lead nowhere, for this process and those that it starts.

    The next file or socket to be opened would get their number, and what somebody prints.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            file = open(os.devnull, mode)  # noqa: SIM115  for good
            os.set_inheritable(file.fileno(), True)
            setattr(sys, name, file)


def leave_standard_output() -> None:
    """Nobody reads it any more: have it lead nowhere. The interpreter tries once more at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
