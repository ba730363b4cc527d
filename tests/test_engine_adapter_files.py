"""Where an adapter is: what of its folder has to be there before anything starts, and with which words it is missed."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from adapter_folders import make_adapter
from checkpoints import checkpoint
from tercet.engine.errors import ModelNotFound, StartupFailed
from tercet.engine.model_files import _fetch_from_hub, locate
from whole_engine import tiny_engine

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def link_to_nothing(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("../blobs/0")


def make_pipe(folder: Path) -> None:
    (folder / CONFIG).unlink()
    os.mkfifo(folder / CONFIG)


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: (folder / CONFIG).unlink(), f"has no {CONFIG}; want a folder with {CONFIG} and {WEIGHTS}"),
    (lambda folder: (folder / WEIGHTS).unlink(), f"has no {WEIGHTS}; want"),
    (
        lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"),
        f"has its weights in adapter_model.bin; want {WEIGHTS}",
    ),
    (link_to_nothing, f"{WEIGHTS} is a link to '../blobs/0', which is not there"),
    (make_pipe, f"{CONFIG} is no file; want one"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter", checkpoint("llama"), 0)


def test_a_folder_in_peft_s_layout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert locate("adapter", "sql") == folder.resolve()
    monkeypatch.setattr("tercet.engine.model_files._have_fetched", lambda source, adapter: folder)
    assert locate("owner/name", "sql") == folder


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_a_damaged_folder(
    folder: Path, damage: Callable[[Path], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(folder)
    monkeypatch.setattr("tercet.engine.model_files._have_fetched", lambda source, adapter: folder)
    for source in (str(folder), "owner/name"):
        with pytest.raises(ModelNotFound, match=re.escape(f"adapter 'sql' in {source!r}") + ".*" + re.escape(words)):
            locate(source, "sql")


def test_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "adapter.gguf").touch()
    for source, words in {
        str(tmp_path / "missing"): "no such folder or file",
        str(tmp_path / "adapter.gguf"): f"is a file; want a folder with {CONFIG} and {WEIGHTS}",
        "no such/name": "is no folder and no valid hub id",
    }.items():
        with pytest.raises(ModelNotFound, match=re.escape(f"adapter 'sql' in {source!r}") + ".*" + words):
            locate(source, "sql")


def test_what_is_fetched_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No model that may be beside it, and nothing of its training."""
    others = ["adapter_model.bin", "checkpoint-9/adapter_model.safetensors", "model.safetensors", "tokenizer.json"]
    fetched: list[str] = []

    def snapshot_download(source: str, **patterns: list[str]) -> str:
        fetched.extend(filter_repo_objects([CONFIG, WEIGHTS, *others], **patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    _fetch_from_hub("owner/name", "sql")
    assert fetched == [CONFIG, WEIGHTS]


def test_an_engine_does_not_start_without_it(tmp_path: Path) -> None:
    """One without a model neither."""
    for options in ({}, {"load_format": "null"}):
        with pytest.raises(StartupFailed, match=r"adapter 'sql' in '.*missing': no such folder or file"):
            tiny_engine("llama", adapter=(f"sql={tmp_path / 'missing'}",), **options)
