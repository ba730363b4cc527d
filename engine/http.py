"""PROCESS http: the OpenAI-compatible door. A client of the engine like any other, that speaks HTTP to its own clients.

It knows nothing of the model, the scheduler or text: what it is asked goes through `ipc/client.py` to the tokenizer
process. This module is what the supervisor starts; it needs the extra `http`, and says so where that is missing.
"""

import asyncio
from functools import partial
from importlib.util import find_spec

from tercet.engine.child import SupervisorLink, run
from tercet.engine.doors import Doors
from tercet.engine.errors import StartupFailed
from tercet.ipc.process_messages import Loaded

_NEEDED = ("uvicorn", "httptools", "starlette")


def main(link: SupervisorLink) -> None:
    """Serve after `Begin`."""
    address = link.spec.config.http
    assert address is not None
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise StartupFailed(f"--http needs {' and '.join(missing)}: pip install 'tercet[http]'")
    # Here and not above: these import what may be missing.
    from tercet.engine.http_server import bind, serve

    doors = Doors(link, partial(bind, address))
    link.tell(Loaded())
    link.wait_begin()
    asyncio.run(serve(link, doors.open()))


if __name__ == "__main__":
    run(main)
