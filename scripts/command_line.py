"""The console command `tercet serve|chat|bench|top …`: the same programs as in scripts/, once Tercet is installed.

It knows their names and where they lie, and nothing of their flags.
"""

import importlib
import sys
from pathlib import Path

PROGRAMS = ("serve", "chat", "bench", "top")


def main() -> None:
    """Run the named program as if it had been started by its path."""
    if len(sys.argv) < 2 or sys.argv[1] not in PROGRAMS:
        got = f"{sys.argv[1]!r}; " if len(sys.argv) > 1 else ""
        print(f"usage: tercet {'|'.join(PROGRAMS)} …\ntercet: {got}want one of these programs", file=sys.stderr)
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    folder = Path(__file__).parent
    name = sys.argv.pop(1)
    sys.argv[0] = f"tercet {name}"
    sys.path.insert(0, str(folder))  # they import each other by their plain names
    sys.exit(importlib.import_module(name).main())
