"""Starts a program once for each rank, hears rank 0, and ends all ranks when one fails: the others would wait for ever.

Knows processes; what ranks do, and on which GPU, the program knows.
"""

import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

_LOOK_SECONDS = 0.1


def run_ranks(command: Sequence[str], size: int, hear: Callable[[str], None]) -> None:
    """Run `command` with `--rendezvous FILE --rank NUMBER` for each rank, to the end of all.

    `hear` gets each line that rank 0 prints; what the others print comes out as it is. SystemExit if any fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [*command, "--rendezvous", f"{folder}/rendezvous", "--rank"]
        ranks: list[subprocess.Popen[str]] = []
        try:
            for rank in range(size):
                ranks.append(
                    subprocess.Popen([*command, str(rank)], stdout=None if rank else subprocess.PIPE, text=True)
                )
            watching = threading.Thread(target=_end_together, args=(ranks,), daemon=True)
            watching.start()
            assert ranks[0].stdout is not None
            for line in ranks[0].stdout:
                hear(line)
            watching.join()
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if any(codes := [process.returncode for process in ranks]):
            raise SystemExit(f"a rank failed: {codes}")


def _end_together(ranks: Sequence[subprocess.Popen[str]]) -> None:
    while None in (codes := [process.poll() for process in ranks]) and not any(codes):
        time.sleep(_LOOK_SECONDS)
    if any(codes):
        for process in ranks:
            process.kill()
