"""Compiles grammars for a try, in a process of its own: on some the library that reads them overflows its stack.

The tokenizer starts it with the first request that has a grammar, and the HTTP door one of its own with the first that
holds calls to a schema; either starts another when it has died or hung: what it died of is refused. `python -m` runs
the process itself, which reads a form a line and says what is wrong with each.
"""

import contextlib
import hashlib
import os
import select
import signal
import subprocess
import sys
import threading
from typing import IO

import msgspec

from tercet.engine.own_program import own_program
from tercet.engine.refusal import Refusal
from tercet.engine.structured_check import check_compiles
from tercet.ipc.messages import Structured

_MOST_SECONDS = 60
"""For one grammar, a start of the process included: what takes longer hangs."""
_MOST_DEATHS = 2
_MOST_KEPT = 256


class GrammarTrial:
    """The asker's side. Thread-safe: one grammar at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: dict[bytes, bytes] = {}
        """By digests of the newest forms: most are asked for again and again."""

    def check(self, asked: Structured) -> None:
        """Raises `Refusal` if this does not compile. Takes milliseconds the first time, behind others."""
        line = msgspec.json.encode(asked) + b"\n"
        digest = hashlib.sha256(line).digest()
        answer = self._answers.get(digest)  # also while another is being tried
        if answer is None:
            with self._lock:  # somebody ahead may have asked the same
                answer = self._answers[digest] = self._answers.get(digest) or self._try(line)
                if len(self._answers) > _MOST_KEPT:
                    del self._answers[next(iter(self._answers))]
        if problem := msgspec.json.decode(answer, type=str):
            raise Refusal("invalid_request", problem)

    def _try(self, line: bytes) -> bytes:
        for _ in range(_MOST_DEATHS):
            if self._process is None or self._process.poll() is not None:  # or dead of something else
                self._process = _start()
            answer = _ask(self._process, line)
            if answer.endswith(b"\n"):
                return answer
            _bury(self._process)
            self._process = None
        text = "structured does not compile: the process that tries it died of it or hung, twice"
        raise Refusal("invalid_request", text)


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(own_program("grammar_trial"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _ask(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    """What it says, a line; less if it died or takes too long."""
    assert process.stdin is not None
    assert process.stdout is not None
    answer = b""
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line)
        process.stdin.flush()
        while not answer.endswith(b"\n") and select.select([process.stdout], [], [], _MOST_SECONDS)[0]:
            said = os.read(process.stdout.fileno(), 65_536)
            if not said:
                break
            answer += said
    return answer


def _bury(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.kill()
    process.wait()
    with contextlib.suppress(BrokenPipeError):  # what it has not read
        process.stdin.close()
    process.stdout.close()


def _problem(line: bytes) -> str:
    try:
        check_compiles(msgspec.json.decode(line, type=Structured))
    except Refusal as refusal:
        return str(refusal)
    return ""


def main(forms: IO[bytes], answers: IO[bytes]) -> None:
    """Until there are no more forms. Who hangs ends by itself: the asker may be dead by then."""
    for line in forms:
        signal.alarm(_MOST_SECONDS)
        answers.write(msgspec.json.encode(_problem(line)) + b"\n")
        answers.flush()
        signal.alarm(0)


if __name__ == "__main__":
    from tercet.engine.child import ignore_group_signals

    ignore_group_signals()
    main(sys.stdin.buffer, sys.stdout.buffer)
