"""In processes started with this folder on their PYTHONPATH, a null worker dies of prompts that hold certain tokens."""

import importlib.abc
import importlib.util
import os
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ABORTS, RAISES, HANGS = 6660, 6661, 6662
"""Token ids, and what the worker does when a request brings one."""


def poison(module: ModuleType) -> None:
    begin = module.NullRunner.begin

    def begin_or_die(self: Any, step: Any) -> None:
        for enter in step.enter:
            ids = memoryview(enter.token_ids).cast("i").tolist()
            if ABORTS in ids:
                os.abort()
            if RAISES in ids:
                raise ArithmeticError("NaN everywhere")
            if HANGS in ids:
                time.sleep(86_400)
        begin(self, step)

    module.NullRunner.begin = begin_or_die  # type: ignore[attr-defined]


class Finder(importlib.abc.MetaPathFinder):
    """Poisons the one module when it is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "tercet.engine.null_runner":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_poison(module: ModuleType) -> None:
            execute(module)
            poison(module)

        spec.loader.exec_module = execute_and_poison  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
