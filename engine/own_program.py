"""How the engine starts a process of its own: in an interpreter of its own, by its module's name."""

import sys


def own_program(name: str, *arguments: str) -> list[str]:
    """The command for `tercet.engine.<name>`. -P: the working folder is the user's, and what lies there no module of
    ours."""
    return [sys.executable, "-P", "-m", f"tercet.engine.{name}", *arguments]
