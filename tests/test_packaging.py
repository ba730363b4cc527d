"""What is built holds every module, and what is installed in place is what lies here."""

import importlib.util
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("engine", "ipc", "model", "triton_kernels")
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # building sets the arguments anew
build_meta.build_sdist(out)
build_meta.build_wheel(out)
"""


def tracked() -> list[str]:
    """The files that belong to the packages."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *FOLDERS, "scripts/*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [name for name in listed if name.endswith((".py", ".json", ".html", ".css", ".js"))]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist and a wheel, made from a copy of the tree and without a network."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def test_no_nested_packages() -> None:
    """They would import here and be missing from the wheel."""
    assert tracked()
    assert not [name for name in tracked() if name.endswith(".py") and name.count("/") != 1]
    assert not (ROOT / "__init__.py").exists()


def test_the_wheel_has_every_module(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(name for name in names if ".dist-info/" not in name) == sorted(f"tercet/{n}" for n in tracked())


def test_the_sdist_has_every_module_and_the_readme(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {*tracked(), "pyproject.toml", "README.md"} <= names


def test_the_wheel_imports_alone(built: Path) -> None:
    """Unpacked elsewhere, ahead of what is installed here."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(built / "unpacked")
    code = "import tercet.ipc.client as c, tercet.engine.llm, tercet.engine.supervisor; print(c.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(built / "unpacked")},
        cwd=built,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(built / "unpacked"))


def test_the_console_command_of_the_wheel(built: Path, tmp_path: Path) -> None:
    """As an installer's wrapper calls it, for each program, with nothing of this folder at hand."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
        (entry,) = [name for name in file.namelist() if name.endswith("entry_points.txt")]
        assert file.read(entry).decode().split() == [
            "[console_scripts]", "tercet", "=", "tercet.scripts.command_line:main",
        ]  # fmt: skip

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = "from tercet.scripts.command_line import main; main()"
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env={"PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    for name in ("serve", "chat", "bench", "top"):
        done = run(name, "--help")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"usage: tercet {name} ")
    for wrong in ((), ("sing",)):
        done = run(*wrong)
        assert (done.returncode, done.stdout) == (2, "")
        assert "serve|chat|bench|top" in done.stderr


def test_installed_in_place() -> None:
    for folder in FOLDERS:
        spec = importlib.util.find_spec(f"tercet.{folder}")
        assert spec is not None
        assert spec.origin is not None
        assert Path(spec.origin).resolve() == (ROOT / folder / "__init__.py").resolve()
