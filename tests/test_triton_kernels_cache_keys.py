"""A kernel's key in Triton's cache is the same whatever its process has compiled before."""

import json
import os
import subprocess
import sys

_KEYS = """
import importlib, json, pkgutil, sys
from triton.runtime.jit import JITCallable
import tercet.triton_kernels as package

names = [found.name for found in pkgutil.iter_modules(package.__path__)]
values = [value for name in names for value in vars(importlib.import_module(f"{package.__name__}.{name}")).values()]
functions = {value._fn_name: value for value in values if isinstance(value, JITCallable)}
order = sorted(functions, reverse=sys.argv[1] == "last first")
print(json.dumps({name: functions[name].cache_key for name in order}))
"""


def keys_in(order: str) -> dict[str, str]:
    """Of all that is compiled, hashed in this order in a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", _KEYS, order]
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=120)
    keys: dict[str, str] = json.loads(process.stdout)
    return keys


def test_keys_are_the_same_in_any_order() -> None:
    one, other = keys_in("first first"), keys_in("last first")
    assert len(one) > 100
    assert {name for name in one | other if one.get(name) != other.get(name)} == set()
