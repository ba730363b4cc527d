"""A real HTTP process for tests, in front of a tokenizer process; its supervisor's pipes are played by the test."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from daemon import free_port
from tercet.engine.child import ChildSpec
from tercet.engine.config import EngineConfig
from tercet.ipc.process_messages import Begin, FromChild, Limits, Loaded, Serving
from tokenizer_process import TokenizerProcess


@contextmanager
def http_process(tokenizer: TokenizerProcess, **settings: Any) -> Iterator[str]:
    """Its URL, once it serves."""
    address = f"127.0.0.1:{free_port()}"
    config = EngineConfig(model="tiny", http=address, log_requests=False, **settings)
    process = subprocess.Popen(
        [sys.executable, "-m", "tercet.engine.http"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        begin = Begin(Limits(100, 512, 257, "float32", "cpu"))
        for message in (ChildSpec("http", 0, config, "", tokenizer.addresses), begin):
            process.stdin.write(msgspec.json.encode(message) + b"\n")
            process.stdin.flush()
        said: list[FromChild] = []
        while not (said and isinstance(said[-1], Serving)):
            line = process.stdout.readline()
            assert line, f"the HTTP process ended; it said {said}"
            said.append(msgspec.json.decode(line, type=FromChild))
        assert any(isinstance(message, Loaded) for message in said)
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
