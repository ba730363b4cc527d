"""What a process did when: spans on the host's monotonic clock, which all processes of a machine share.

A lane is one sequence of spans, a file of its own, written by one thread through mapped memory: a span is in the file
as soon as it is added, whatever kills the process, and adding one makes no system call, but for room once in 8,192. The
file is a ring that keeps the newest spans, so a daemon may record for ever; a disk that is full ends the recording and
nothing else. Knows files and clocks; who records what is told beside the work.
"""

import errno
import gc
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tercet.engine.errors import StartupFailed
from tercet.engine.log_line import log_line

SUFFIX = ".spans"
_RECORD = struct.Struct("<qqqii")
_CAPACITY = 2**20
"""Spans that a lane keeps: 32 MiB, of which the disk holds what is used, in pieces."""
_PIECE = 2**18
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Span(IntEnum):
    """What is done from its begin to its end."""

    HEAR = 1
    """tokenizer: one message of a client, up to the request's leaving for the scheduler. Number: the request's,
    0 for what is none."""
    SPEAK = 2
    """tokenizer: what the scheduler said, made into text and sent. Number: its messages."""
    TURN = 3
    """scheduler: from a message's arrival until there is nothing to do but wait. Number: 0."""
    TAKE_SUBMIT = 4
    """scheduler: a new request queued. Number: the request's."""
    TAKE_SAMPLED = 5
    """scheduler: the tokens of a step accounted for and sent on. Number: the step's."""
    TAKE_OTHER = 6
    PLAN = 7
    """scheduler: a plan made and sent. Number: its step's."""
    BEGIN = 8
    """worker: a plan's changes applied. Number: its step's."""
    LAUNCH = 9
    """worker: a step started; on the CPU, computed. Number: the step's, its lease's first."""
    AWAIT = 10
    """worker, answers thread: waiting for the tokens of a step."""
    DECODE = 11
    """device: a step without prompts, from its first kernel to its last; on the CPU, the computing. Detail: rows."""
    PREFILL = 12
    """device: the same for a step with prompts in it."""
    COLLECT = 13
    """any process: Python's garbage collection. Number: its generation."""
    REQUEST = 14
    """client: a request, or a whole workload, from asking to having it. Number: which."""


class Record(NamedTuple):
    """One span as it is kept."""

    begin_ns: int
    end_ns: int
    number: int
    detail: int
    """How much: rows of a step, bytes, messages."""
    span: Span


class Lane:
    """One sequence of spans. One thread adds to it."""

    def __init__(self, path: Path, tell_full: Callable[[OSError], None]) -> None:
        """`tell_full` is called when the disk has no room, and nothing is recorded from then on."""
        self._tell_full = tell_full
        self._size = _CAPACITY * _RECORD.size
        self._offset = self._room = 0
        self.now = time.monotonic_ns
        self._file: BinaryIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("x+b")
            try:
                file.truncate(self._size)
            except OSError:
                path.unlink()
                raise
            self._memory = mmap.mmap(file.fileno(), self._size)
            self._file = file
        except OSError as error:
            if error.errno not in _FULL:
                raise
            tell_full(error)

    def add(self, span: Span, begin_ns: int, end_ns: int, number: int = 0, detail: int = 0) -> None:
        """Record one span; the oldest is forgotten where there is no room."""
        if self._offset == self._room and not self._make_room():
            return
        _RECORD.pack_into(self._memory, self._offset, begin_ns, end_ns, number, detail, span)
        self._offset += _RECORD.size
        if self._offset == self._size:
            self._offset = 0

    def end(self, span: Span, begin_ns: int, number: int = 0, detail: int = 0) -> None:
        """Record a span that ends now."""
        self.add(span, begin_ns, time.monotonic_ns(), number, detail)

    def _make_room(self) -> bool:
        """On the disk, ahead of writing: a page of the mapping that finds none there ends the process (SIGBUS)."""
        if self._file is None:
            return False
        try:
            os.posix_fallocate(self._file.fileno(), self._room, _PIECE)
        except OSError as error:
            self._file.close()
            self._file = None
            self._tell_full(error)
            return False
        self._room += _PIECE
        return True


def open_lanes(folder: str, process: str, *names: str) -> list[Lane]:
    """Lanes of this process, each in a new file of the folder, which is made where it is not there.

    A process that is started again on a full disk records nothing; it is told once.
    """
    is_told = False

    def tell_full(error: OSError) -> None:
        nonlocal is_told
        if not is_told:
            is_told = True
            log_line(f"warning: --trace-dir {folder}: {error.strerror}: {process} no longer records all that it does")

    try:
        return [Lane(Path(folder) / f"{process}.{name}.{os.getpid()}{SUFFIX}", tell_full) for name in names]
    except OSError as error:
        raise StartupFailed(f"--trace-dir {folder}: {error.strerror}: {error.filename}") from None


def record_collections(lane: Lane) -> None:
    """Have each garbage collection of this process recorded: they stop all its threads."""
    begin_ns = 0

    def on_collection(phase: str, info: dict[str, int]) -> None:
        nonlocal begin_ns
        if phase == "start":
            begin_ns = lane.now()
        else:
            lane.end(Span.COLLECT, begin_ns, info["generation"], info["collected"])

    gc.callbacks.append(on_collection)


def read_lane(path: Path) -> list[Record]:
    """The spans of one lane in order of their begin, the outer before the inner. Its process may be at work still."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        records = list(_records(memory))
    return sorted(records, key=lambda record: (record.begin_ns, -record.end_ns))


def _records(memory: mmap.mmap) -> Iterator[Record]:
    for offset in range(0, len(memory), _RECORD.size):
        begin_ns, end_ns, number, detail, span = _RECORD.unpack_from(memory, offset)
        if not span:  # nothing was ever written from here on
            return
        yield Record(begin_ns, end_ns, number, detail, Span(span))
