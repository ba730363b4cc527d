"""Lines for an operator: whole where they are read, lost where nobody reads, and never waited for."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints import checkpoint
from covering import long
from daemon import SCRIPTS, Daemon
from tercet.engine.log_line import log_line
from tercet.ipc.client import Client
from tercet.ipc.messages import SamplingParams

_LINES = "from tercet.engine.log_line import log_line\nfor _ in range(2000): log_line('x' * 100)\n"
_BARS = """
from start_up_display import StartUpDisplay
from tercet.ipc.process_messages import Progress
display = StartUpDisplay()
for number in range(50_000):
    display.show(Progress('worker 0', f'graphs {number // 2}', number % 2 + 1, 2))
    display.show(Progress('worker 0', f'half a bar {number}', 1, 2))
display.close()
"""


def test_whole_lines_where_they_are_read(capfd: pytest.CaptureFixture[str]) -> None:
    for text in ("", "a line", "ä" * 10_000, "half of a character: \ud800"):
        log_line(text)
    assert capfd.readouterr().err == f"\na line\n{'ä' * 10_000}\nhalf of a character: ?\n"


def test_where_there_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    log_line("a line")
    assert capsys.readouterr().err == "a line\n"


@pytest.mark.parametrize("program", [_LINES, _BARS], ids=["lines", "bars"])
def test_nobody_reads(program: str) -> None:
    """A pipe holds 64 KiB; who waits for more room would wait for ever."""
    reader, writer = os.pipe()
    try:
        run = subprocess.run(
            [sys.executable, "-c", program + "print('done')"],
            stdout=subprocess.PIPE,
            stderr=writer,
            timeout=60,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(SCRIPTS)])},
        )
        os.close(writer)
        assert (run.returncode, run.stdout) == (0, "done\n")
        assert len(os.read(reader, 2**20)) > 2**15  # what was read, until it was full
    finally:
        os.close(reader)


_LLM = """
import sys
from tercet.engine.llm import LLM
with LLM(sys.argv[1], device='cpu', kv_cache_memory=4 << 20) as llm:
    assert len(llm.generate([[1, 2, 3]])) == 1
    print('done')
"""


@pytest.mark.parametrize("closed", [long("2>&-"), long("<&- 2>&-")])
async def test_standard_error_is_closed(closed: str, tmp_path: Path) -> None:
    """Of a daemon, and of a program with an engine of its own."""
    run = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable]
    flags = ["--device", "cpu", "--kv-cache-memory", "4MiB", "--listen", f"ipc://{tmp_path}/door"]
    with subprocess.Popen(
        [*run, str(SCRIPTS / "serve.py"), str(checkpoint("llama")), *flags], stdout=subprocess.PIPE, text=True
    ) as daemon:
        try:
            assert daemon.stdout is not None
            assert daemon.stdout.readline().startswith("ready ")
            async with Client(f"ipc://{tmp_path}/door") as client:
                assert (await client.generate([1, 2, 3], SamplingParams(max_tokens=2))).token_ids
            assert os.readlink(f"/proc/{daemon.pid}/fd/2") == "/dev/null"
            daemon.terminate()
            assert daemon.wait(20) == 0
        finally:
            daemon.kill()
    done = subprocess.run([*run, "-c", _LLM, str(checkpoint("llama"))], stdout=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n")


def test_whoever_read_has_gone() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run([sys.executable, "-c", _LINES], stderr=writer, timeout=60, env={**os.environ})
    os.close(writer)
    assert run.returncode == 0


async def test_an_engine_whose_log_nobody_reads(ids_only_model: Path, tmp_path: Path) -> None:
    """It serves on, and ends when it is told to."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 512)
    os.set_blocking(writer, True)
    address = f"ipc://{tmp_path}/engine"
    with (
        os.fdopen(writer, "w") as log,
        Daemon(str(ids_only_model), "--load-format", "null", "--listen", address, log=log),
    ):
        async with Client(address) as client:
            for _ in range(20):
                await client.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    assert set(os.read(reader, 2**20)) == {ord("x")}
    os.close(reader)
