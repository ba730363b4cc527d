"""PROCESS fetcher: brings one model, or an adapter, onto this machine for `model_files.py`, and ends with who asked.

The libraries that fetch, and pip, know of no way to stop; a process can be ended. It knows no engine.
"""

import os
import signal
import sys
import threading
import time

from tercet.engine.errors import ModelNotFound
from tercet.engine.model_files import fetch

_CLEANING_S = 2.0


def main() -> int:
    """As arguments what is fetched and, of an adapter, its name; on standard output where it is, or, with exit code 1,
    why it is not here.

    The end of standard input means that nobody wants it any more.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # an owned engine ignores it
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_asker, name="asker-watch", daemon=True).start()
    with answers:
        try:
            answers.write(os.fsencode(fetch(*sys.argv[1:])))
        except ModelNotFound as error:
            answers.write(os.fsencode(str(error)))
            return 1
        except KeyboardInterrupt:
            os._exit(1)
    return 0


def _end_with_asker() -> None:
    os.read(0, 1)
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGINT)  # it kills pip, and removes what that has brought
    time.sleep(_CLEANING_S)
    os._exit(1)  # it waits for threads of a library


if __name__ == "__main__":
    sys.exit(main())
