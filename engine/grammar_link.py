"""The scheduler's link to a process that computes masks: starts it when it is first wanted, replaces it if it dies.

What an answer has said so far is kept here, so that a successor of that process can go on. A question that killed two
of them, or kept two of them busy for too long, is given up. Knows no request and no slot.
"""

import contextlib
import subprocess
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

import msgspec

from tercet.engine.grammar_process import GrammarSpec
from tercet.engine.own_program import own_program
from tercet.ipc.grammar_messages import Allowed, Disallowed, Extend, Follow, Release, ToGrammars
from tercet.ipc.sockets import Outbox

_MOST_SECONDS = 60.0
"""For one question, a start of the process included: what takes longer hangs."""
_MOST_DEATHS = 2


@dataclass(eq=False)
class Followed:
    """An answer that has to match a grammar, as far as it has come."""

    grammar: str
    token_ids: "array[int]"
    row: int
    """Where its masks are, in the table of them."""
    ticket: int | None = None
    """Its name in the process; None if that does not know it."""
    question: int | None = None
    """Counts messages: which one asks for the mask that is awaited."""
    asked_at: float = 0.0
    num_deaths: int = 0
    has_mask: bool = False
    """What may come next is known."""
    failure: str | None = None
    """Why it cannot go on."""


class GrammarLink:
    """Questions go out, and answers come through the scheduler's inbox: `take` makes sense of them."""

    def __init__(self, spec: GrammarSpec, names: Iterator[str], tickets: Iterator[int], rows: Iterable[int]) -> None:
        """`spec`: of the process, but for its inbox; each has one of another of `names`. `tickets` grow.

        `rows`: of the table, which nobody else writes: a process answers in order, so it has written for the last time
        for who has gone when it begins for the next.
        """
        self._spec = spec
        self._names = names
        self._counter = tickets
        self._free_rows = deque(rows)
        """That which is free for longest is taken first: plans that name it may still be in flight."""
        self._process: subprocess.Popen[bytes] | None = None
        self._outbox: Outbox | None = None
        self._heard_at = 0.0
        self._known: dict[int, Followed] = {}
        """By ticket: what the process that lives now knows."""

    @property
    def num_free(self) -> int:
        """Answers that it can follow beside those that it does."""
        return len(self._free_rows)

    def follow(self, grammar: str, token_ids: Sequence[int]) -> Followed:
        """Ask what may come after these tokens of an answer."""
        followed = Followed(grammar, array("i", token_ids), self._free_rows.popleft())
        self._ask(followed)
        return followed

    def extend(self, answers: Iterable[tuple[Followed, int]]) -> None:
        """Ask what may come after one more token of each of these."""
        question, now = next(self._counter), time.monotonic()
        tickets, token_ids = array("q"), array("i")
        for followed, token_id in answers:
            followed.token_ids.append(token_id)
            if followed.ticket is None:
                self._ask(followed)
                continue
            followed.question, followed.asked_at = question, now
            tickets.append(followed.ticket)
            token_ids.append(token_id)
        if tickets:
            self._send(Extend(tickets.tobytes(), token_ids.tobytes()))

    def release(self, followed: Followed) -> None:
        """Nobody wants to know more of this one."""
        self._free_rows.append(followed.row)
        if followed.ticket is not None:
            del self._known[followed.ticket]
            self._send(Release(followed.ticket))

    def take(self, message: Allowed | Disallowed) -> list[Followed]:
        """Those that have a mask now, or fail. What was released, or asked of a dead process, is of no interest."""
        self._heard_at = time.monotonic()
        match message:
            case Allowed(tickets):
                return [_answer(self._known[ticket]) for ticket in array("q", tickets) if ticket in self._known]
            case Disallowed(ticket, text):
                return [_answer(self._known[ticket], text)] if ticket in self._known else []
            case _:
                assert_never(message)

    def check(self) -> list[Followed]:
        """See whether the process lives and gets on; call it now and then. Returns those that fail."""
        if self._process is None:
            return []
        first = min(self._waiting(), key=lambda one: one.question or 0, default=None)
        if first is not None and time.monotonic() - max(first.asked_at, self._heard_at) > _MOST_SECONDS:
            self._process.kill()
            self._process.wait()
        if self._process.poll() is None:
            return []
        return self._bury(first)

    def _bury(self, first: Followed | None) -> list[Followed]:
        """The process is dead. What was asked first may be why; all is asked again of the next one."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._outbox is not None
        how = self._process.returncode
        print(f"the process that reads grammars ended with status {how}; it is replaced", file=sys.stderr, flush=True)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._outbox.abandon()
        self._process = self._outbox = None
        waiting = sorted(self._waiting(), key=lambda one: one.question or 0)
        suspects = [one for one in waiting if first is not None and one.question == first.question]
        for followed in self._known.values():
            followed.ticket = None
        self._known.clear()
        failed = []
        for followed in suspects:
            followed.num_deaths += 1
            if followed.num_deaths == _MOST_DEATHS:
                text = f"structured: the process that reads grammars died of it twice, the last time with status {how}"
                failed.append(_answer(followed, text))
        for followed in waiting:
            if followed.failure is None:
                self._ask(followed)
        return failed

    def _waiting(self) -> list[Followed]:
        return [followed for followed in self._known.values() if followed.question is not None]

    def _ask(self, followed: Followed) -> None:
        """All that it has said so far, under a new name: what still comes under an old one is stale."""
        followed.ticket = followed.question = next(self._counter)
        followed.asked_at = time.monotonic()
        self._known[followed.ticket] = followed
        self._send(Follow(followed.ticket, followed.row, followed.grammar, followed.token_ids.tobytes()))

    def _send(self, message: ToGrammars) -> None:
        self.start()
        assert self._process is not None
        assert self._outbox is not None
        if not self._outbox.try_send(message):
            self._process.kill()  # thousands of questions behind: it hangs

    def start(self) -> None:
        """Unless it runs. It reads the tokenizer, which takes a second."""
        if self._process is not None:
            return
        spec = msgspec.structs.replace(self._spec, inbox=next(self._names))
        self._process = subprocess.Popen(
            own_program("grammar_process"), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `check` sees that it is dead
            self._process.stdin.write(msgspec.json.encode(spec) + b"\n")
            self._process.stdin.flush()
        self._outbox = Outbox(spec.inbox)


def _answer(followed: Followed, failure: str | None = None) -> Followed:
    followed.question, followed.has_mask, followed.failure = None, failure is None, failure
    followed.num_deaths = 0
    return followed
