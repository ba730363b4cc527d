"""PROCESS supervisor of an engine that another program owns, for `engine_process.py`.

It knows its owner's pipes and signals; the engine is the supervisor's matter.
"""

import os
import select
import sys
import threading

import msgspec

from tercet.engine.child import ignore_group_signals
from tercet.engine.config import EngineConfig
from tercet.engine.errors import TercetError
from tercet.engine.standard_files import open_standard_files
from tercet.engine.supervisor import Supervisor
from tercet.ipc.process_messages import FromSupervisor, LastWords


def main() -> None:
    """Settings on standard input, reports on output; the end of input, or of the owner, is the end of the engine."""
    ignore_group_signals()  # the owner's end is what ends this
    open_standard_files()
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def report(message: FromSupervisor) -> None:
        try:
            reports.write(msgspec.json.encode(message) + b"\n")
            reports.flush()
        except BrokenPipeError:
            pass  # the owner is gone; its end of our standard input says so too

    owner = os.pidfd_open(os.getppid())
    # Not sys.stdin: the interpreter closes that at its end, and dies of it while the watching thread is reading.
    commands = os.fdopen(os.dup(0), "rb", buffering=0)  # what has been read ahead, poll would not see
    config = msgspec.json.decode(commands.readline(), type=EngineConfig)
    supervisor = Supervisor(config, report)

    def watch_owner() -> None:
        watched = select.poll()
        watched.register(commands, select.POLLIN)
        watched.register(owner, select.POLLIN)  # it may end, and a fork of it keep our input open
        while owner not in dict(watched.poll()) and commands.readline():
            stop()  # each line asks for the end: the first drains, the second is impatient
        stop()
        stop()

    def stop() -> None:
        if supervisor.is_fetching:
            os._exit(0)  # as in scripts/serve.py
        supervisor.stop()

    threading.Thread(target=watch_owner, name="owner-watch", daemon=True).start()
    try:
        supervisor.run()
    except TercetError as error:
        report(LastWords(message=str(error)))
        sys.exit(1)


if __name__ == "__main__":
    main()
