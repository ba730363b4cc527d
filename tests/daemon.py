"""scripts/serve.py for tests, as a user starts it."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO, Self

SCRIPTS = Path(__file__).parent.parent / "scripts"


def free_port() -> int:
    """A TCP port of loopback that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Daemon:
    """Started with these arguments, and ready. `log`: where its standard error goes, if not where ours does."""

    def __init__(self, *arguments: str, log: IO[str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / "serve.py"), *arguments], stdout=subprocess.PIPE, stderr=log, text=True
        )
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()
        match = re.match(r"ready listen=(\S+)", self.ready)
        assert match, f"serve.py says {self.ready!r} and ended with {self.process.poll()}"
        self.address = match[1]
        http = re.search(r" http=(\S+)", self.ready)
        self.http = http[1] if http else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(20) == 0
            assert self.process.stdout.read() == "", "only the ready line belongs on standard output"
        finally:
            self.process.kill()
            self.process.stdout.close()
