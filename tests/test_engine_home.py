"""Users without a home, or with one that cannot be written to, and model files that they may not read."""

import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints import checkpoint
from daemon import SCRIPTS

_UID = 54321
_STRANGER = ["unshare", "--user", f"--map-user={_UID}"]
"""A user without an entry, to whom files belong that are ours; nobody is above permissions there."""
pytestmark = pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run([*_STRANGER, "true"], capture_output=True).returncode != 0,
    reason="needs user namespaces",
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Of a model, as a stranger's who may read it."""
    folder = tmp_path / "folder" / "model"
    shutil.copytree(checkpoint("llama"), folder)
    yield folder
    for path in (folder.parent, folder):
        path.chmod(0o700)


def serve(model: Path | str, tmp_path: Path, **environment: str) -> subprocess.Popen[str]:
    unset = {"HOME", "XDG_CACHE_HOME", "HF_HOME", "TRITON_HOME", "TRITON_CACHE_DIR"}
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    flags = ["--device", "cpu", "--kv-cache-memory", "4MiB"]
    return subprocess.Popen(
        [*_STRANGER, sys.executable, str(SCRIPTS / "serve.py"), str(model), *flags],
        env={**inherited, "TMPDIR": str(tmp_path), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def refusal(model: Path | str, tmp_path: Path, **environment: str) -> str:
    """Why it does not start: its last line, and no traceback before that."""
    with serve(model, tmp_path, **environment) as process:
        out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert "Traceback" not in said
    return said.splitlines()[-1]


@pytest.mark.long
def test_no_home_at_all(tmp_path: Path) -> None:
    """A folder of this user alone takes its place, at the next start as well."""
    for _ in range(2):
        with serve(checkpoint("llama"), tmp_path) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline().startswith("ready ")
                process.send_signal(signal.SIGTERM)
                _, said = process.communicate(timeout=20)
            finally:
                process.kill()
        assert process.returncode == 0
        assert f"user {_UID} has no entry; {tmp_path}/tercet-home-{_UID} takes its place" in said
    assert stat.S_IMODE((tmp_path / f"tercet-home-{_UID}").stat().st_mode) == 0o700


def test_what_takes_its_place_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / f"tercet-home-{_UID}").mkdir(mode=0o755)
    assert "is not this user's alone" in refusal(checkpoint("llama"), tmp_path)
    (tmp_path / f"tercet-home-{_UID}").rmdir()
    (tmp_path / f"tercet-home-{_UID}").symlink_to(tmp_path)
    assert "is not this user's alone" in refusal(checkpoint("llama"), tmp_path)
    assert "~/model': no such folder" in refusal("~/model", tmp_path, HOME="/")


def test_a_home_that_cannot_be_written_to(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    words = f"the demo model cannot be kept in {home}/.cache/tercet: Permission denied; want XDG_CACHE_HOME to name"
    try:
        assert words in refusal("demo", tmp_path, HOME=str(home))
        program = "import os; from tercet.engine.home import have_home; have_home(compiles=True); print(os.environ)"
        run = [*_STRANGER, sys.executable, "-c", program]
        environment = {"HOME": str(home), "TMPDIR": str(tmp_path)}
        done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=60, check=True)
        assert f"'TRITON_HOME': '{tmp_path}/tercet-home-{_UID}'" in done.stdout
        assert f"{home} cannot be written to; kernels are kept in" in done.stderr
    finally:
        home.chmod(0o700)


@pytest.mark.parametrize("name", ["..", ".", "config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_may_not_be_read(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / name).chmod(0)
    named = {"..": folder, ".": folder / "config.json"}.get(name, folder / name)
    said = refusal(folder, tmp_path, HOME=str(tmp_path))
    assert said == f"tercet: model '{folder}': {named} may not be read by user {_UID}"


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch(mode=0)
    assert f"{file} may not be read by user {_UID}" in refusal(file, tmp_path, HOME=str(tmp_path))
