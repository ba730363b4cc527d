"""A real HTTP process for tests, in front of a tokenizer process; its supervisor's pipes are played by the test."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from daemon import free_port
from tercet.engine.child import ChildSpec, Paths
from tercet.engine.config import EngineConfig
from tercet.ipc.process_messages import Begin, FromChild, Limits, Loaded, Serving
from tokenizer_process import TokenizerProcess


@contextmanager
def http_process(
    tokenizer: TokenizerProcess, *, port: int | None = None, loaded: Callable[[], Any] = lambda: None, **settings: Any
) -> Iterator[str]:
    """Its URL, once it serves. `loaded` is called before it is told to begin."""
    address = f"127.0.0.1:{port or free_port()}"
    config = EngineConfig(model="tiny", http=address, **{"log_requests": False, **settings})
    process = subprocess.Popen(
        [sys.executable, "-m", "tercet.engine.http"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        told: list[FromChild] = []
        begin = Begin(Limits(100, 512, 257, "float32", "cpu", 8))
        spec = ChildSpec("http", 0, config, Paths(""), tokenizer.addresses)
        for message, answer in ((spec, Loaded), (begin, Serving)):
            process.stdin.write(msgspec.json.encode(message) + b"\n")
            process.stdin.flush()
            while not (told and isinstance(told[-1], answer)):
                line = process.stdout.readline()
                assert line, f"the HTTP process ended; it said {told}"
                told.append(msgspec.json.decode(line, type=FromChild))
            if answer is Loaded:
                loaded()
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
