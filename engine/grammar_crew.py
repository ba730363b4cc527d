"""The processes that compute masks, each of which follows some of the answers: one takes a mask after the other, and a
step of many answers would wait for it. Knows answers and links; which process lives, each link knows.
"""

import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tercet.engine.grammar_link import Followed, GrammarLink
from tercet.engine.grammar_process import GrammarSpec
from tercet.ipc.addresses import Addresses
from tercet.ipc.grammar_messages import Allowed, Disallowed

_MOST = 6
"""Each reads the tokenizer for itself."""
_CORES_EACH = 2
_OTHER_CORES = 4
"""For the rest of the engine."""


def _forget_tables(folder: Path, incarnation: int) -> None:
    """Of schedulers that are gone; but plans of the last one may be on their way to workers still."""
    kept = {f"masks-{number}" for number in (incarnation - 1, incarnation)}
    for path in folder.glob("masks-*"):
        if path.name not in kept:
            path.unlink(missing_ok=True)


class GrammarCrew:
    """All are started with the first answer that has a grammar, so that none has to wait for one later."""

    def __init__(self, addresses: Addresses, incarnation: int, model_path: str, vocab_size: int, most: int) -> None:
        """At most `most` answers are followed at a time."""
        cores = len(os.sched_getaffinity(0)) - _OTHER_CORES
        count = max(1, min(cores // _CORES_EACH, _MOST))
        self._rows_each = -(-most // count)
        self.mask_table = f"{addresses.directory}/masks-{incarnation}"
        _forget_tables(Path(addresses.directory), incarnation)
        num_rows = count * self._rows_each
        spec = GrammarSpec("", addresses.scheduler, self.mask_table, num_rows, model_path, vocab_size)
        names = (f"ipc://{addresses.directory}/m{incarnation}-{number}" for number in itertools.count())
        self._links = [
            GrammarLink(spec, names, itertools.count(index, count), range(first, first + self._rows_each))
            for index, first in enumerate(range(0, num_rows, self._rows_each))
        ]

    def follow(self, grammar: str, token_ids: Sequence[int]) -> Followed:
        """Ask what may come after these tokens of an answer."""
        for link in self._links:
            link.start()
        return max(self._links, key=lambda link: link.num_free).follow(grammar, token_ids)

    def extend(self, answers: Iterable[tuple[Followed, int]]) -> None:
        """Ask what may come after one more token of each of these."""
        shares: dict[GrammarLink, list[tuple[Followed, int]]] = {}
        for followed, token_id in answers:
            shares.setdefault(self._link_of(followed), []).append((followed, token_id))
        for link, share in shares.items():
            link.extend(share)

    def release(self, followed: Followed) -> None:
        """Nobody wants to know more of this one."""
        self._link_of(followed).release(followed)

    def take(self, message: Allowed | Disallowed) -> list[Followed]:
        """Those that have a mask now, or fail."""
        return self._links[message.first_ticket % len(self._links)].take(message)

    def check(self) -> list[Followed]:
        """See whether all live and get on; call it now and then. Returns those that fail."""
        return [failed for link in self._links for failed in link.check()]

    def _link_of(self, followed: Followed) -> GrammarLink:
        return self._links[followed.row // self._rows_each]
