"""What a person sees while an engine starts: one line a phase with its seconds, a bar for phases that can count."""

import contextlib
import sys
import time

from tqdm import tqdm

from tercet.engine.log_line import can_be_written, log_line
from tercet.ipc.process_messages import FromSupervisor, Progress


class StartUpDisplay:
    """Shows rank 0's phases on standard error, of the first replica; the others do the same at the same time."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        tqdm.monitor_interval = 0  # no thread that draws as well, and may wait for ever for whoever reads
        self._bars: dict[tuple[str, str], tqdm[None]] = {}

    def show(self, message: FromSupervisor) -> None:
        if not isinstance(message, Progress):
            return
        if message.process.removeprefix("replica 0 ") not in ("worker 0", "tokenizer", "scheduler"):
            return
        if message.total <= 1:
            if message.done:
                log_line(f"[{time.monotonic() - self._started:6.2f}s] {message.process}: {message.what}")
            return
        with contextlib.suppress(OSError, ValueError):  # as lines are: where it cannot be drawn, it is not
            if can_be_written(sys.stderr.fileno()):
                self._show_bar(message)

    def _show_bar(self, message: Progress) -> None:
        key = (message.process, message.what)
        if key not in self._bars:
            is_bytes = "bytes" in message.what or message.total > 2**20
            self._bars[key] = tqdm(
                total=message.total,
                desc=message.what,
                unit="B" if is_bytes else "",
                unit_scale=is_bytes,
                file=sys.stderr,
            )
        bar = self._bars[key]
        bar.update(message.done - bar.n)
        if message.done >= message.total:
            bar.close()

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for bar in self._bars.values():
                bar.disable = not can_be_written(sys.stderr.fileno())
                bar.close()
