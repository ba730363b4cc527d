"""Bytecode of packages that come without it: kept in a folder of ours where Python may not write it beside them."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

_KEEP = "import os; from tercet.engine.bytecode import keep_bytecode; keep_bytecode('heavy')\n"
_CHILD = "import heavy, os; print(os.path.exists(heavy.__cached__), heavy.__cached__)"
_RUN_CHILD = _KEEP + f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_CHILD!r}], check=True)"
_STRANGER = ["unshare", "--user", "--map-user=54321"]
"""A user to whom root's files belong by name only: nobody is above permissions there."""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    package = tmp_path / "site" / "heavy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("answer = 42\n")
    return package


def run(package: Path, code: str, command: tuple[str, ...] = (), **environment: str) -> str:
    """What a program of a user with a cache of his own says, of which Python may write bytecode unless it says so."""
    forgotten = {"PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"}
    inherited = {name: value for name, value in os.environ.items() if name not in forgotten}
    cache = {"XDG_CACHE_HOME": str(package.parents[1] / "cache"), "PYTHONPATH": str(package.parent)}
    done = subprocess.run(
        [*command, sys.executable, "-c", code],
        env={**inherited, **cache, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_it_is_kept_where_none_may_be_written(package: Path) -> None:
    there, path = run(package, _RUN_CHILD, PYTHONDONTWRITEBYTECODE="1").split()
    folder = package.parents[1] / "cache" / "tercet" / "bytecode"
    assert there == "True"
    assert Path(path).is_relative_to(folder)
    assert list(package.iterdir()) == [package / "__init__.py"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    written = Path(path).stat().st_mtime_ns
    assert run(package, _RUN_CHILD, PYTHONDONTWRITEBYTECODE="1") == f"True {path}"
    assert Path(path).stat().st_mtime_ns == written  # read, not compiled again


@pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run([*_STRANGER, "true"], capture_output=True).returncode != 0,
    reason="needs user namespaces",
)
def test_it_is_kept_for_who_may_not_write_there(package: Path) -> None:
    package.chmod(0o555)
    there, path = run(package, _RUN_CHILD, tuple(_STRANGER)).split()
    package.chmod(0o755)
    assert there == "True"
    assert "/cache/tercet/bytecode/" in path


def test_python_does_as_always_where_it_can(package: Path) -> None:
    says = _KEEP + "print(os.environ.get('PYTHONPYCACHEPREFIX'))"
    assert run(package, says) == "None"  # it writes beside the package
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(package)], check=True)
    assert run(package, says, PYTHONDONTWRITEBYTECODE="1") == "None"  # it is there
    assert run(package, says.replace("heavy", "nowhere"), PYTHONDONTWRITEBYTECODE="1") == "None"


def test_what_a_user_says_stays(package: Path) -> None:
    says = _KEEP + "print(os.environ['PYTHONPYCACHEPREFIX'], os.environ['PYTHONDONTWRITEBYTECODE'])"
    assert run(package, says, PYTHONDONTWRITEBYTECODE="1", PYTHONPYCACHEPREFIX="/mine") == "/mine 1"


def test_not_in_a_folder_of_others(package: Path) -> None:
    """Nor in none: what is where no folder can be made stays as it is."""
    says = _KEEP + "print(os.environ.get('PYTHONPYCACHEPREFIX'), os.environ['PYTHONDONTWRITEBYTECODE'])"
    folder = package.parents[1] / "cache" / "tercet" / "bytecode"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert run(package, says, PYTHONDONTWRITEBYTECODE="1") == "None 1"
    folder.rmdir()
    folder.symlink_to(package)
    assert run(package, says, PYTHONDONTWRITEBYTECODE="1") == "None 1"
    assert run(package, says, PYTHONDONTWRITEBYTECODE="1", XDG_CACHE_HOME="/proc/none") == "None 1"
