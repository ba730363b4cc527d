"""Too few files or processes: a start ends in words that name the limit; who dies is started again when it can be."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from daemon import SCRIPTS
from engine_children import children
from null_daemon import NullDaemon, eventually
from tercet.ipc.client import Client
from tercet.ipc.messages import SamplingParams

_FILES = 'ulimit -n $0 && exec "$@"'
_CAPS = "+dac_read_search,+dac_override"
_AS_SOMEBODY = (
    ["setpriv", "--reuid=54321", "--clear-groups", f"--inh-caps={_CAPS}", f"--ambient-caps={_CAPS}"]
    if os.geteuid() == 0
    else ["unshare", "--user"]
)
"""Whose processes are counted apart. No limit holds for root, so it is somebody else then, who may read as much."""


def refusal(prefix: list[str], model: Path, tmp_path: Path) -> str:
    """Why it does not start; nothing of it is left."""
    serve = [sys.executable, str(SCRIPTS / "serve.py"), str(model), "--load-format", "null"]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    with subprocess.Popen(
        [*prefix, *serve],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, ""), said
    eventually(lambda: not is_there(process.pid), "a process of it is left")
    assert not list(tmp_path.glob("tercet-*"))
    return said[said.rindex("\ntercet: ") :]


def is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def table_size(process: int | str) -> int:
    """Files for which the kernel's table has room."""
    (line,) = (line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("FDSize:"))
    return int(line.split()[1])


@pytest.mark.parametrize("most", [100, 1000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]])
def test_room_for_files(most: int) -> None:
    """As many as there may be, within reason, and none is left open."""
    code = """if True:
        import os, resource
        from tercet.engine.system_limits import make_room_for_files
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(os.environ["MOST"]),) * 2)
        before = os.listdir("/proc/self/fd")
        make_room_for_files()
        assert os.listdir("/proc/self/fd") == before
        print(*(line.split()[1] for line in open("/proc/self/status") if line.startswith("FDSize:")))
    """
    environment = {**os.environ, "MOST": str(most)}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(said.stdout) >= min(most, 2**14)


def test_who_has_clients_has_room_for_their_files(null_daemon: NullDaemon) -> None:
    """A table that grows would hold up all of them."""
    null_daemon.wait_ready()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for name in ("tokenizer", "scheduler"):
        (process,) = children(null_daemon.process.pid, name)
        assert table_size(process.pid) >= min(most, 2**14)


@pytest.mark.parametrize("most", [6, 9, 17])
def test_too_few_files(most: int, ids_only_model: Path, tmp_path: Path) -> None:
    said = refusal(["sh", "-c", _FILES, str(most)], ids_only_model, tmp_path)
    assert f"a process here may have {most} files open, and that is too few (RLIMIT_NOFILE: ulimit -Hn)" in said


@pytest.mark.skipif(
    not shutil.which("prlimit")
    or not shutil.which(_AS_SOMEBODY[0])
    or subprocess.run([*_AS_SOMEBODY, "true"], capture_output=True).returncode != 0,
    reason="cannot be somebody who has no processes",
)
@pytest.mark.parametrize("most", [1, 3, 6, 9, 12])
def test_too_few_processes(most: int, ids_only_model: Path, tmp_path: Path) -> None:
    """For the processes, for their first thread, for threads of ZeroMQ."""
    said = refusal([*_AS_SOMEBODY, "prlimit", f"--nproc={most}"], ids_only_model, tmp_path)
    assert f"may have {most} processes and threads (RLIMIT_NPROC: ulimit -u)" in said


def test_a_soft_limit_is_raised(ids_only_model: Path, tmp_path: Path) -> None:
    serve = [sys.executable, str(SCRIPTS / "serve.py"), str(ids_only_model), "--load-format", "null"]
    limited = ["sh", "-c", 'ulimit -Sn 16 && exec "$@"', "sh"]
    with subprocess.Popen([*limited, *serve], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ready ")
            process.terminate()
            assert process.wait(20) == 0
        finally:
            process.kill()


async def test_a_process_that_cannot_be_replaced_at_once(null_daemon: NullDaemon) -> None:
    null_daemon.wait_ready()
    pid = null_daemon.process.pid
    assert null_daemon.process.stderr is not None
    async with Client(null_daemon.address) as client:
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (psutil.Process(pid).num_fds(), before[1]))
        children(pid, "scheduler")[0].send_signal(signal.SIGKILL)
        while "scheduler cannot be started" not in (line := null_daemon.process.stderr.readline()):
            assert line, "it ended"
        assert "Too many open files" in line
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        answer = await client.generate([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
        assert len(answer.token_ids) == 5
