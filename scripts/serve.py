"""Serve a model as a daemon: `python scripts/serve.py MODEL [--listen ipc://…] [--http 127.0.0.1:8000] …`.

Prints start-up phases with their seconds, the resolved settings once, one `ready` line on standard output when a
request would be served, and one line that says where the seconds went. SIGTERM, Ctrl-C and the end of the terminal let
running requests finish; a second SIGTERM or Ctrl-C ends at once.
"""

import contextlib
import itertools
import os
import signal
import sys

import msgspec

from engine_flags import add_engine_flags, engine_config
from program_parser import ProgramParser
from start_up_display import StartUpDisplay
from tercet.engine.config import EngineConfig
from tercet.engine.errors import TercetError
from tercet.engine.http_address import http_url
from tercet.engine.log_line import log_line
from tercet.engine.standard_files import open_standard_files
from tercet.engine.start_clock import in_words
from tercet.engine.supervisor import Supervisor
from tercet.ipc.process_messages import FromSupervisor, Ready


def read_arguments() -> EngineConfig:
    """The settings that the command line and the environment ask for; exits where they are wrong."""
    parser = ProgramParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="folder, .gguf file, hub id, or `demo`")
    parser.add_argument("--model", dest="model_flag", help="the same as the positional MODEL", metavar="MODEL")
    parser.add_argument(
        "--listen", action="append", default=[], help="ipc://PATH or tcp://127.0.0.1:PORT; may be repeated"
    )
    parser.add_argument(
        "--listen-key",
        default=os.environ.get("TERCET_LISTEN_KEY") or None,
        help="clients of --listen need it; beyond loopback there has to be one; default: TERCET_LISTEN_KEY",
    )
    parser.add_argument("--http", metavar="HOST:PORT", help="OpenAI-compatible HTTP door, as in 127.0.0.1:8000")
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        help="opens the HTTP door; may be repeated; TERCET_API_KEY in the environment is one more",
    )
    add_engine_flags(parser)
    arguments = parser.parse_args()
    if (arguments.model is None) == (arguments.model_flag is None):
        parser.error("name the model once: MODEL or --model MODEL")
    keys = [*arguments.api_key, *filter(None, [os.environ.get("TERCET_API_KEY") if arguments.http else None])]
    doors = {
        "listen": tuple(arguments.listen),
        "listen_key": arguments.listen_key,
        "http": arguments.http,
        "api_key": tuple(keys),
    }
    try:
        model = arguments.model_flag if arguments.model is None else arguments.model
        return engine_config(model, arguments, **doors)
    except ValueError as error:
        parser.error(str(error))


def shown(config: EngineConfig) -> str:
    """As JSON, without its secrets."""
    hidden = msgspec.structs.replace(config, api_key=("********",) * len(config.api_key))
    if config.listen_key is not None:
        hidden = msgspec.structs.replace(hidden, listen_key="*" * 32)
    return msgspec.json.encode(hidden).decode()


def main() -> int:
    open_standard_files()
    config = read_arguments()
    display = StartUpDisplay()

    def report(message: FromSupervisor) -> None:
        display.show(message)
        if isinstance(message, Ready):
            display.close()
            listen = " ".join(f"listen={address}" for address in message.listen)
            http = f" http={http_url(config.http)}" if config.http else ""
            with contextlib.suppress(OSError):  # as in the log
                print(f"ready {listen}{http} model={message.model} in {message.seconds:.1f}s", flush=True)
            log_line(f"start {message.seconds:.1f} s: {in_words(message.phases)}")

    log_line("settings " + shown(config))
    supervisor = Supervisor(config, report)

    asked, urged = itertools.count(), itertools.count()

    def end(number: int, _: object) -> None:
        if supervisor.is_fetching:
            os._exit(0)  # what fetches ends with us; an orderly end would wait for it
        # Another signal may come at any line of this, and be heard before the next: each has its number first.
        is_first = next(asked) == 0
        # A hang-up may come twice, from the shell and the kernel, or beside a SIGTERM: that is no impatience.
        is_impatience = number != signal.SIGHUP and next(urged) > 0
        if is_first or is_impatience:
            supervisor.stop()

    heard = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        heard.append(signal.SIGHUP)
    for number in heard:
        signal.signal(number, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)  # whoever has started us may wait for its own with them blocked
    try:
        supervisor.run()
    except TercetError as error:
        display.close()
        log_line(f"tercet: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
