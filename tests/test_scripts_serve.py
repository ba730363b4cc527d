"""scripts/serve.py as a user starts it: the ready line, the words before it, and wrong flags."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints import checkpoint
from daemon import SCRIPTS, Daemon, free_port
from raw_client import RawClient


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "serve.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_phases_then_one_ready_line_then_service(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, tcp = str(checkpoint("llama")), f"tcp://127.0.0.1:{free_port()}"
    flags = ["--device", "cpu", "--kv-cache-memory", "8MiB", "--served-model-name", "tiny"]
    with Daemon(model, "--listen", f"ipc://{tmp_path}/door", "--listen", tcp, *flags) as daemon:
        start, _, seconds = daemon.ready.strip().rpartition(" in ")
        assert start == f"ready listen=ipc://{tmp_path}/door listen={tcp} model=tiny"
        assert 0 < float(seconds.removesuffix("s")) < 60
        for address in (f"ipc://{tmp_path}/door", tcp):
            with RawClient(address) as client:
                client.ask("Generate", "a", "the cat", {"max_tokens": 3, "ignore_eos": True})
                assert len(client.answers(1)["a"][1]) == 3
    said = capfd.readouterr().err
    settings = next(line for line in said.splitlines() if line.startswith("settings "))
    assert json.loads(settings.removeprefix("settings "))["kv_cache_memory"] == 8 << 20
    assert said.count("settings ") == 1
    assert "worker 0: " in said
    (account,) = [line for line in said.splitlines() if line.startswith("start ")]
    assert account.startswith(f"start {seconds.strip().removesuffix('s')} s: ")
    assert ", imports " in account
    assert "pages of 64 tokens in float32" in said
    assert "Traceback" not in said
    assert not (tmp_path / "door").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name the model once"),
        (["a", "--model", "b"], "name the model once"),
        (["x", "--page-size", "17"], "--page-size"),
        ([""], "--model is empty"),
        (["x", "--served-model-name", ""], "--served-model-name is empty"),
        (["x", "--kv-cache-memory", "lots"], "'lots' is no size; want a number with KiB"),
        (["x", "--kv-cache-memory", "1e999"], "'1e999' is no size"),
        (["x", "--device", "tpu"], "--device"),
        (["x", "--adapter", "a=b", "--adapter", "a=c"], "--adapter got the name 'a' twice"),
        (["x", "--run-ahead", "0"], "--run-ahead got 0; want 1 to"),
        (["x", "--speculative-config", "ngram"], "--speculative-config: 'ngram'"),
        (["x", "--speculative-config", '{"method": "eagle", "num_speculative_tokens": 3}'], "'eagle'"),
        (["x", "--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization got 1.5; want 0.01 to 1.0"),
        (["x", "--listen", "tcp://0.0.0.0:5555"], "want a loopback address"),
        (["x", "--listen", "ipc://a", "--listen", "ipc://a"], "--listen got 'ipc://a' more than once"),
        (["x", "--listen", "http://127.0.0.1:80"], "want ipc://PATH or tcp://HOST:PORT"),
        (["x", "--max-num-batched-tokens", "8"], "want at least --max-num-seqs"),
        (["x", "--no-such-flag"], "--no-such-flag"),
    ],
)
def test_wrong_flags(arguments: list[str], words: str) -> None:
    done = serve(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_is_not_there() -> None:
    done = serve("/no/such/folder")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "tercet: model '/no/such/folder': no such folder or file"


def test_no_place_for_the_engine_s_own_sockets(
    ids_only_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    done = serve(str(ids_only_model), "--load-format", "null")
    assert (done.returncode, done.stdout) == (1, "")
    assert "want at most 107 (a shorter TMPDIR helps" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not list(deep.iterdir())


def test_a_model_that_is_being_fetched_can_be_done_without(tmp_path: Path) -> None:
    """SIGTERM ends it, although the hub answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(30)
        endpoint = f"http://127.0.0.1:{hub.getsockname()[1]}"
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, str(SCRIPTS / "serve.py"), "owner/name"]
        with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
            asked, _ = hub.accept()
            with asked:
                process.terminate()
                assert process.wait(5) == 0


def test_help_names_every_flag_of_the_settings() -> None:
    from tercet.engine.config import EngineConfig

    said = serve("--help").stdout
    for name in EngineConfig.__struct_fields__:
        assert "--" + name.replace("_", "-") in said
