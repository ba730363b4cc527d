"""Start and end of a whole engine: readiness, last words, and nothing left behind, whoever dies first."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from daemon import free_port
from engine_children import children, is_alive
from null_daemon import NullDaemon, eventually
from tercet.engine import crew
from tercet.engine.config import EngineConfig
from tercet.engine.engine_process import EngineProcess
from tercet.engine.errors import StartupFailed
from tercet.engine.supervisor import Supervisor
from tercet.ipc.client import Client, EngineDied
from tercet.ipc.messages import SamplingParams
from tercet.ipc.process_messages import Ready

LONG = SamplingParams(max_tokens=7000, ignore_eos=True)


async def test_ready_line_and_service(null_daemon: NullDaemon, ids_only_model: Path) -> None:
    line = null_daemon.wait_ready()
    assert line.startswith(f"ready listen={null_daemon.address} model={ids_only_model} in ")
    async with Client(null_daemon.address) as client:
        answer = await client.generate([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(answer.token_ids) == 5
    assert answer.reason == "length"


def test_a_start_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    """The tokenizer has bound the address and reads the model, a file that takes seconds, when the worker dies."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "eos_token_id": 2}')
    (tmp_path / "model" / "generation_config.json").write_text(f'{{"a": [{"0, " * 30_000_000}0]}}')
    daemon = NullDaemon(tmp_path / "model", tmp_path / "front")
    eventually(daemon.socket.exists, "nobody has bound the address", 30)
    (worker,) = children(daemon.process.pid, "worker")
    worker.kill()
    _, said = daemon.process.communicate(timeout=20)
    assert daemon.process.returncode == 1
    assert "worker 0 was killed by SIGKILL" in said
    daemon.assert_all_gone()


def test_killed_supervisor_leaves_nothing(null_daemon: NullDaemon) -> None:
    null_daemon.wait_ready()
    sockets = [str(socket.laddr) for child in null_daemon.children for socket in child.net_connections("unix")]
    private = {Path(path).parent for path in sockets if "/tercet-" in path}
    null_daemon.process.kill()
    null_daemon.assert_all_gone()
    assert private
    eventually(lambda: not any(folder.exists() for folder in private), "the private folder is still there")


@pytest.mark.parametrize("name", ["worker", "scheduler"])
async def test_deaths_without_end_end_the_engine_with_the_name(ids_only_model: Path, tmp_path: Path, name: str) -> None:
    daemon = NullDaemon(ids_only_model, tmp_path / "front", "--max-restarts", "1")
    daemon.wait_ready()
    async with Client(daemon.address) as client:
        with pytest.raises(EngineDied) as caught:
            async for _ in client.stream([1, 2, 3], LONG):
                for process in children(daemon.process.pid, name):
                    process.kill()
    assert daemon.process.wait(20) == 1
    words = f"{name}{' 0' if name == 'worker' else ''} was killed by SIGKILL; it died 2 times within 60 s"
    assert words in str(caught.value)
    assert words in daemon.process.communicate()[1]
    daemon.assert_all_gone()


def test_startup_ends_at_once_with_last_words(ids_only_model: Path, tmp_path: Path) -> None:
    """The socket is another engine's: the tokenizer says so, nobody waits for the deadline, the other one lives."""
    with EngineProcess(EngineConfig(model=str(ids_only_model), load_format="null", listen=(f"ipc://{tmp_path}/a",))):
        started = time.monotonic()
        with pytest.raises(StartupFailed, match=r"cannot listen on .*/a: another process does"):
            EngineProcess(EngineConfig(model=str(ids_only_model), load_format="null", listen=(f"ipc://{tmp_path}/a",)))
        assert time.monotonic() - started < 20
        assert (tmp_path / "a").exists()
    assert not (tmp_path / "a").exists()


def test_startup_deadline(ids_only_model: Path) -> None:
    with pytest.raises(StartupFailed, match=r"did not load within --startup-timeout 0.1 s"):
        EngineProcess(EngineConfig(model=str(ids_only_model), load_format="null", startup_timeout=0.1))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("./no/such/folder", "no such folder or file"),
        (__file__, "not a .gguf file"),
    ],
)
def test_a_model_that_is_not_there(model: str, words: str) -> None:
    with pytest.raises(StartupFailed, match=words):
        EngineProcess(EngineConfig(model=model, load_format="null"))


def test_owner_killed_takes_the_engine_along(ids_only_model: Path) -> None:
    code = (
        "import sys, time\n"
        "from tercet.engine.config import EngineConfig\n"
        "from tercet.engine.engine_process import EngineProcess\n"
        "engine = EngineProcess(EngineConfig(model=sys.argv[1], load_format='null'))\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(ids_only_model)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"up\n"
    processes = psutil.Process(owner.pid).children(recursive=True)
    assert len(processes) == 4
    os.kill(owner.pid, signal.SIGKILL)
    owner.communicate()
    eventually(lambda: not any(is_alive(process) for process in processes), "processes outlived their owner")


@pytest.mark.usefixtures("strange_folder")
def test_modules_in_the_working_folder_are_nobody_s(ids_only_model: Path) -> None:
    http = f"127.0.0.1:{free_port()}"
    EngineProcess(EngineConfig(model=str(ids_only_model), load_format="null", http=http)).close()


def test_who_speaks_again_is_spared(ids_only_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was held up for as long as the deadline, and goes on while it is asked where it stands."""
    monkeypatch.setattr(crew, "_SAYING_SECONDS", 1.5)
    serving = threading.Event()
    config = EngineConfig(model=str(ids_only_model), load_format="null", heartbeat_timeout=1.0)
    supervisor = Supervisor(config, lambda message: serving.set() if isinstance(message, Ready) else None)
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    try:
        assert serving.wait(30)
        (held_up,) = children(os.getpid(), "tokenizer")
        held_up.suspend()
        time.sleep(1.6)
        held_up.resume()
        time.sleep(2)
        assert is_alive(held_up)
    finally:
        supervisor.stop()
        thread.join(20)
    assert not thread.is_alive()
