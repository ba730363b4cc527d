"""README.md and docs/: the files, flags, names and headings that they name are there, and files as short as they say.

What the pages say of these is not checked here; the programs in them are run by test_readme.py and test_docs_wire.py.
"""

import re
import subprocess
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
_FILE = re.compile(r"(?<![\w./-])[\w*][\w*./-]*\.(?:py|md|json|svg|toml)\b")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
_OF_USERS = {
    *("adapter_config.json", "config.json", "generation_config.json", "hf_quant_config.json"),
    *("picture.svg", "trace.json", "tuned.json"),
}
"""Files that a reader has, or that a command makes."""


@cache
def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.splitlines() if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


@cache
def words() -> set[str]:
    """Of all that is not prose, but for this file."""
    code = [name for name in tracked() if not name.endswith((".md", ".svg")) and not name.endswith(Path(__file__).name)]
    return {word for name in code for word in re.findall(r"\w+", (ROOT / name).read_text())}


def spans(page: str) -> list[str]:
    """What stands between backticks on one line."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL))


def commands(page: str) -> list[str]:
    """Of the programs in scripts/ and tests/, with their arguments."""
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in (*lines, *spans(page)) if re.search(r"(?:scripts|tests)/\w+\.py", line)]


@cache
def flags_of(script: str) -> set[str]:
    """All that the program and the modules it takes its flags from add to a parser."""
    text = (ROOT / script).read_text()
    flags = set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', text))
    for name, rest in re.findall(r'\bflag\(\s*"([\w-]+)"([^)]*)', text):
        flags |= {f"--{name}", f"--no-{name}"} if "BooleanOptionalAction" in rest else {f"--{name}"}
    for module in re.findall(r"^from (\w+) import", text, re.MULTILINE):
        if f"scripts/{module}.py" in tracked():
            flags |= flags_of(f"scripts/{module}.py")
    return flags


def headings(page: str) -> set[str]:
    """As a link names them."""
    found = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in found}


@pytest.mark.parametrize("page", PAGES)
def test_files_are_there(page: str) -> None:
    names = {name for text in (*spans(page), *commands(page)) for name in _FILE.findall(text)} - _OF_USERS
    known = [*tracked(), *(Path(name).name for name in tracked())]
    # A folder may be left out beside a file of the same folder: `tuned/x.json`.
    missing = [name for name in names if not any(fnmatch(one, name) or one.endswith(f"/{name}") for one in known)]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_flags_are_known(page: str) -> None:
    programs = [name for name in tracked() if fnmatch(name, "scripts/*.py") or fnmatch(name, "tests/*.py")]
    everywhere = {flag for program in programs for flag in flags_of(program)}
    named = {flag for text in spans(page) for flag in _FLAG.findall(text)}
    assert not named - everywhere
    for command in commands(page):
        script, arguments = re.findall(r"((?:scripts|tests)/\w+\.py)(.*)", command)[0]
        assert not set(_FLAG.findall(arguments)) - flags_of(script), command


@pytest.mark.parametrize("page", PAGES)
def test_names_are_in_the_code(page: str) -> None:
    """Every word of what is set as code: functions, fields, messages, values."""
    unknown = {text: set(re.findall(r"[A-Za-z_]\w{2,}", _FILE.sub("", text))) - words() for text in spans(page)}
    assert not {text: missing for text, missing in unknown.items() if missing and "<" not in text}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_headings(page: str) -> None:
    for target, heading in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", (ROOT / page).read_text()):
        other = (ROOT / page).parent / target if target else ROOT / page
        assert heading in headings(str(other.resolve().relative_to(ROOT))), f"{target}#{heading}"


def test_files_are_short() -> None:
    """As README.md says."""
    readme = (ROOT / "README.md").read_text()
    assert "No Python file has more than 300 lines; most have fewer than 200." in " ".join(readme.split())
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in tracked() if name.endswith(".py")}
    assert not {name: length for name, length in lengths.items() if length > 300}
    assert sum(length < 200 for length in lengths.values()) > 0.8 * len(lengths)
