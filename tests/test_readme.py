"""README.md: its first lines, its links, and each of its programs, run as they stand on the demo model."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon import Daemon, free_port
from demo import demo_file

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROGRAMS = dict(zip(("offline", "client", "raw"), re.findall(r"```python\n(.*?)```", README, re.DOTALL), strict=True))
ADDRESS = "tcp://127.0.0.1:5555"
HTTP = "127.0.0.1:8000"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """The command of the README, on a port that is free here."""
    demo_file()
    (command,) = re.findall(r"^\$ \.venv/bin/python (scripts/serve\.py demo .*)$", README, re.MULTILINE)
    for address in (ADDRESS.removeprefix("tcp://"), HTTP):
        assert address in command
        command = command.replace(address, f"127.0.0.1:{free_port()}")
    words = command.split()
    assert words[:3] == ["scripts/serve.py", "demo", "--listen"]
    with Daemon(*words[1:], "--device", "cpu", "--max-model-len", "512") as engine:
        yield engine


def run(program: str, folder: Path, *flags: str) -> str:
    script = folder / "program.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, *flags, str(script)], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_commands_come_first() -> None:
    lines = [line for line in README.splitlines() if line and not line.startswith("```")]
    assert lines[0] == "# Tercet"
    assert lines[1].startswith("$ make chat ")
    assert lines[2].startswith("$ make test ")
    makefile = (ROOT / "Makefile").read_text()
    assert "\nchat: .venv/installed\n" in makefile
    assert "\ntest: .venv/installed\n" in makefile


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    file = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", file.read_text()):
        assert target.startswith("https://") or (file.parent / target).exists(), target


def test_offline(tmp_path: Path) -> None:
    demo_file()
    lines = run(PROGRAMS["offline"], tmp_path).splitlines()
    assert "Paris" in lines[0]
    assert lines[1].startswith("One, two, three, -> ")
    assert any(line.startswith("The opposite of hot is -> ") for line in lines)


def test_client(daemon: Daemon, tmp_path: Path) -> None:
    assert ADDRESS in PROGRAMS["client"]
    lines = run(PROGRAMS["client"].replace(ADDRESS, daemon.address), tmp_path).splitlines()
    assert "Paris" in lines[0]
    assert "four" in "".join(lines[1:])
    assert lines[-1].endswith(" 8")


def test_raw_socket_without_tercet(daemon: Daemon, tmp_path: Path) -> None:
    assert "tercet" not in PROGRAMS["raw"]
    out = run(PROGRAMS["raw"].replace(ADDRESS, daemon.address), tmp_path, "-I")
    assert "Paris" in out
    assert out.endswith("\n")


def test_the_wire_page_s_program(daemon: Daemon, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "wire.md").read_text(), re.DOTALL)
    assert "Paris" in run(program.replace("sys.argv[1]", repr(daemon.address)), tmp_path, "-I")


def test_the_http_page_s_programs(daemon: Daemon, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "http.md").read_text().replace(f"http://{HTTP}", daemon.http)
    of_openai, of_responses, of_anthropic, of_embeddings = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    command = page.partition("```console\n$ ")[2].partition("```")[0]
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("data: [DONE]\n\n")
    assert "Paris" in done.stdout
    assert "Paris" in run(of_anthropic, tmp_path)
    shown = "print(len(vectors), len(vectors[0]))"
    said = run(f"{of_openai}{of_responses}{of_embeddings}{shown}", tmp_path)
    assert said.count("Paris") >= 2
    assert said.endswith("2 576\n")
