"""A kernel's key in Triton's cache is the same whatever its process has compiled before."""

import json
import os
import subprocess
import sys

_KEYS = """
import importlib, json, os, pkgutil
from triton.runtime.jit import JITCallable
import tercet.triton_kernels as package

names = [found.name for found in pkgutil.iter_modules(package.__path__)]
values = [value for name in names for value in vars(importlib.import_module(f"{package.__name__}.{name}")).values()]
functions = {value._fn_name: value for value in values if isinstance(value, JITCallable)}
for last_first in (False, True):
    if not (child := os.fork()):
        order = sorted(functions, reverse=last_first)
        print(json.dumps({name: functions[name].cache_key for name in order}), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def keys_in_two_orders() -> list[dict[str, str]]:
    """Of all that is compiled, hashed in each order in a process of its own; both have the same imports."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", _KEYS]
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=120)
    return [json.loads(line) for line in process.stdout.splitlines()]


def test_keys_are_the_same_in_any_order() -> None:
    one, other = keys_in_two_orders()
    assert len(one) > 100
    assert {name for name in one | other if one.get(name) != other.get(name)} == set()
