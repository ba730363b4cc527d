"""PROCESS grammars: says which tokens may come next in answers that have to match a grammar.

The scheduler starts some of it with the first request that has one (`grammar_crew.py`): reading a large tokenizer,
compiling a grammar and computing a mask hold the interpreter for as long as they take, and the step loop shall not
wait. It knows tickets, tokens and rows of a table; it knows no request and no slot.
"""

import os
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import IO, assert_never

import msgspec

from tercet.engine.child import die_with_parent, ignore_group_signals
from tercet.engine.errors import TercetError
from tercet.engine.grammars import GrammarFailed, Grammars
from tercet.ipc.grammar_messages import Allowed, Disallowed, Extend, Follow, Release, ToGrammars
from tercet.ipc.mask_table import create_mask_table, map_mask_table
from tercet.ipc.sockets import Inbox, Outbox

_PATIENCE_S = 0.001
"""Masks of one step are told together, but those that are there wait no longer than this for a slow one."""


class GrammarSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line of its standard input, whose end is also its own."""

    inbox: str
    scheduler: str
    mask_table: str
    num_rows: int
    model_path: str
    vocab_size: int


class MaskDesk:
    """Answers questions. `tell` gets the answers."""

    def __init__(self, grammars: Grammars, tell: Callable[[Allowed | Disallowed], None]) -> None:
        self._grammars = grammars
        self._tell = tell
        self._answered = array("q")

    def work(self, asked: ToGrammars) -> None:
        """Answer one message, all of it."""
        match asked:
            case Follow(ticket, row, grammar, token_ids):
                self._grammars.start(ticket, row, grammar, array("i", token_ids))
                self._answer(ticket)
            case Extend(tickets, token_ids):
                patient_until = time.monotonic() + _PATIENCE_S
                for ticket, token_id in zip(array("q", tickets), array("i", token_ids), strict=True):
                    self._grammars.accept(ticket, token_id)
                    self._answer(ticket)
                    if time.monotonic() > patient_until:
                        self._flush()
                        patient_until = time.monotonic() + _PATIENCE_S
            case Release(ticket):
                self._grammars.drop(ticket)
            case _:
                assert_never(asked)
        self._flush()

    def _answer(self, ticket: int) -> None:
        try:
            self._grammars.write_mask(ticket)
        except GrammarFailed as failed:
            self._tell(Disallowed(ticket, str(failed)))
        else:
            self._answered.append(ticket)

    def _flush(self) -> None:
        if self._answered:
            self._tell(Allowed(self._answered.tobytes()))
            self._answered = array("q")


def main() -> None:
    ignore_group_signals()  # the scheduler's end is what ends this
    die_with_parent()  # the library may hang and hold the interpreter
    commands = os.fdopen(os.dup(0), "rb")
    spec = msgspec.json.decode(commands.readline(), type=GrammarSpec)
    threading.Thread(target=_exit_at_end, args=(commands,), daemon=True).start()
    inbox: Inbox[ToGrammars] = Inbox(spec.inbox, ToGrammars)
    outbox = Outbox(spec.scheduler)
    work: Callable[[ToGrammars], None]
    try:
        work = MaskDesk(_load(spec), outbox.send).work
    except OSError as error:  # there is no room for the table of masks, as a rule
        work = _refuse_all(f"structured: grammars cannot be used: {error}", outbox)
    except (TercetError, ValueError, ImportError) as error:
        work = _refuse_all(f"structured: grammars cannot be used with this checkpoint's tokenizer: {error}", outbox)
    while True:
        message = inbox.receive()
        assert message is not None, "it waits for ever"
        work(message)


def _load(spec: GrammarSpec) -> Grammars:
    from tercet.engine.text_codec import load_codec

    codec = load_codec(Path(spec.model_path))
    assert codec.tokenizer is not None, "the tokenizer process lets no grammar through without one"
    path = Path(spec.mask_table)
    create_mask_table(path, spec.num_rows, spec.vocab_size)
    masks = map_mask_table(path, spec.vocab_size, writable=True)
    return Grammars(codec.tokenizer.to_str(), codec.eos_ids, spec.vocab_size, masks)


def _refuse_all(reason: str, outbox: Outbox) -> Callable[[ToGrammars], None]:
    def work(asked: ToGrammars) -> None:
        if isinstance(asked, Follow):
            outbox.send(Disallowed(asked.ticket, reason))

    return work


def _exit_at_end(commands: IO[bytes]) -> None:
    commands.read()
    os._exit(0)


if __name__ == "__main__":
    main()
