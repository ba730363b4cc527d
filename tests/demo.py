"""The demo model for tests; without it, and without a way to fetch it, they are skipped."""

import functools
from pathlib import Path

import pytest

from tercet.engine.errors import ModelNotFound
from tercet.engine.model_files import demo_model


@functools.cache
def demo_file() -> Path:
    try:
        return demo_model()
    except ModelNotFound as error:
        pytest.skip(f"no demo model: {error}")
