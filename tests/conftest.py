"""What many tests share: models made on the spot, sockets, no threads fighting over two cores, memory under watch."""

import functools
import gc
import hashlib
import json
import os
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from null_daemon import null_daemon
from tokenizer_fixtures import client, engine, folder, peer, shared, url

__all__ = ["client", "engine", "folder", "null_daemon", "peer", "shared", "url"]
if os.environ.get("TRITON_INTERPRET") == "1":
    from bounds import check_bounds
    from interpreted_fp8 import convert_rightly
    from quick_interpreter import quicken

    check_bounds()
    convert_rightly()
    quicken()


# While modules are imported and tests are made, the garbage collector would look through them again and again: a third
# of the time that it takes until the first test runs.
gc.disable()

# httpx reads all certificates for each client, of HTTP too, and tests make hundreds: 50 ms each.
ssl.create_default_context = functools.cache(ssl.create_default_context)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", type=Path, metavar="FOLDER", help="leave files to other runs with the same folder")


class _Share:
    """Of several runs side by side: a file is whose run comes to it first, so that all end at about the same time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mine: dict[Path, bool] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """True: it is done with, and nothing is said of it."""
        if item.path not in self._mine:
            claim = self._folder / hashlib.sha256(os.fsencode(item.path)).hexdigest()
            try:
                claim.touch(exist_ok=False)
                self._mine[item.path] = True
            except FileExistsError:
                self._mine[item.path] = False
        return None if self._mine[item.path] else True


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background ignores interrupts, in Python too and in all that it starts; half of `make test` runs there.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if (folder := config.getoption("--share")) is not None:
        config.pluginmanager.register(_Share(folder))


def pytest_collection_finish() -> None:
    """What there is by now stays until the end."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def ids_only_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and no tokenizer: enough for an engine whose worker computes nothing."""
    folder = tmp_path_factory.mktemp("ids_only")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    return folder


@pytest.fixture
def strange_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder has a module of a name that every process imports."""
    folder = tmp_path / "strange"
    folder.mkdir()
    (folder / "msgspec.py").write_text("raise SystemExit('msgspec.py of the working folder was imported')")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def nan_memory() -> Iterator[None]:
    """Workers started meanwhile get `torch.empty` filled with NaN."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "nan_memory"), prepend=os.pathsep)
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For torch, whose threads cost tiny models more than they bring. Most tests do without torch itself."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def address(tmp_path: Path) -> str:
    """Where nobody listens yet."""
    return f"ipc://{tmp_path}/s"


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """Whose sockets end with the test."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)
