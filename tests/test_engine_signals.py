"""Signals to an engine, as terminals, shells and service managers send them: to its supervisor, or to all processes."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from daemon import SCRIPTS
from null_daemon import NullDaemon, eventually
from tercet.ipc.client import Client, ClientError, Overloaded
from tercet.ipc.messages import SamplingParams

_NUM_TOKENS = 4000
_LONG = SamplingParams(max_tokens=_NUM_TOKENS, ignore_eos=True)


@pytest.mark.parametrize(
    "numbers", [[signal.SIGTERM, signal.SIGHUP], [signal.SIGINT], [signal.SIGHUP, signal.SIGHUP, signal.SIGTERM]]
)
async def test_first_signal_drains(null_daemon: NullDaemon, numbers: list[signal.Signals]) -> None:
    """A hang-up makes no second: a shell and the kernel may both send one, and a service manager beside SIGTERM."""
    null_daemon.wait_ready()
    async with Client(null_daemon.address) as client:
        stream = client.stream([1, 2, 3], _LONG)
        first = await anext(aiter(stream))
        for number in numbers:
            null_daemon.signal_all(number)
        num_tokens = len(first.token_ids)
        refused = False
        async for piece in stream:
            num_tokens += len(piece.token_ids)
            if not refused:
                try:
                    await client.generate([1], SamplingParams(max_tokens=1))
                except Overloaded as error:
                    refused = error.code == "draining"
    assert refused
    assert num_tokens == _NUM_TOKENS
    assert null_daemon.process.wait(20) == 0
    null_daemon.assert_all_gone()


async def test_second_signal_ends_at_once(null_daemon: NullDaemon) -> None:
    null_daemon.wait_ready()
    async with Client(null_daemon.address) as client:
        with pytest.raises(ClientError):
            async for piece in client.stream([1, 2, 3], _LONG):
                if piece.token_ids:
                    null_daemon.process.send_signal(signal.SIGTERM)
                    null_daemon.process.send_signal(signal.SIGTERM)
    assert null_daemon.process.wait(10) == 0
    null_daemon.assert_all_gone()


def test_under_nohup_nobody_hears_hang_ups(ids_only_model: Path, tmp_path: Path) -> None:
    daemon = NullDaemon(ids_only_model, tmp_path / "front", hang_ups=signal.SIG_IGN)
    daemon.wait_ready()
    for pid in (daemon.process.pid, *(child.pid for child in daemon.children)):
        status = Path(f"/proc/{pid}/status").read_text()
        ignored = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
        assert int(ignored.split()[1], 16) >> (signal.SIGHUP - 1) & 1
    daemon.process.send_signal(signal.SIGTERM)
    daemon.process.communicate()
    assert daemon.process.returncode == 0


def test_who_starts_it_has_signals_blocked(ids_only_model: Path, tmp_path: Path) -> None:
    """As a program that waits for them by itself has; what it starts inherits that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    try:
        daemon = NullDaemon(ids_only_model, tmp_path / "front")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    daemon.wait_ready()
    daemon.process.send_signal(signal.SIGTERM)
    try:
        daemon.process.communicate(timeout=10)
    finally:
        daemon.process.kill()
    assert daemon.process.returncode == 0
    daemon.assert_all_gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_end_is_asked_for_while_children_start(null_daemon: NullDaemon, number: signal.Signals) -> None:
    """Of all processes at once; the children have not come to ignore it."""
    eventually(lambda: psutil.Process(null_daemon.process.pid).children() != [], "no child was started")
    null_daemon.signal_all(number)
    _, said = null_daemon.process.communicate(timeout=20)
    assert null_daemon.process.returncode == 0, said
    assert "Traceback" not in said
    null_daemon.assert_all_gone()


def test_a_signal_within_a_signal_is_no_second_one() -> None:
    """SIGTERM comes while Python is at what it does about the hang-up before it."""
    program = """
import os, signal, sys
import serve

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs this may be under nohup

class Told:
    is_fetching, stops = False, 0

    def __init__(self, *_): ...

    def stop(self):
        self.stops += 1
        if self.stops == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def run(self):
        os.kill(os.getpid(), signal.SIGHUP)
        assert self.stops == 1, self.stops
        os.kill(os.getpid(), signal.SIGINT)
        assert self.stops == 2, self.stops

serve.Supervisor = Told
sys.exit(serve.main())
"""
    command = [sys.executable, "-c", program, "demo"]
    done = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
