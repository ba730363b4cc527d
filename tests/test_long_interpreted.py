"""What tests of kernels leave out of `make test`, in Triton's interpreter: cases for which others stand."""

import re
from pathlib import Path

import pytest

from interpreted import rerun_interpreted

CALL = "\n    rerun_interpreted(__file__)"
LONG = re.compile(r"^from covering import .*\b(long|covering)\b|mark\.long", re.MULTILINE)
TEXTS = {path: path.read_text() for path in sorted(Path(__file__).parent.glob("test_*.py"))}
FILES = [path for path, text in TEXTS.items() if CALL in text and LONG.search(text)]


def test_there_are_some() -> None:
    assert FILES


@pytest.mark.long
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_those_of(path: Path) -> None:
    rerun_interpreted(str(path), "long and not gpu")
