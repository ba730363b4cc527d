"""The processes that compute masks, each of which follows some of the answers: one takes a mask after the other, and a
step of many answers would wait for it. Knows answers and links; which process lives, each link knows.
"""

import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tercet.engine.child import ChildSpec
from tercet.engine.grammar_link import Followed, GrammarLink
from tercet.engine.grammar_process import GrammarSpec
from tercet.ipc.grammar_messages import Allowed, Disallowed

_MOST = 6
"""Each reads the tokenizer for itself."""
_CORES_EACH = 2
_OTHER_CORES = 4
"""For the rest of the engine."""


def _forget_tables(folder: Path, replica: int) -> None:
    """Of schedulers that are gone; but plans of the last one may be on their way to workers still."""
    number = {path: path.name.rpartition("-")[2] for path in folder.glob(f"masks-{replica}-*")}
    last = max((path for path in number if number[path].isdecimal()), key=lambda path: int(number[path]), default=None)
    for path in number:
        if path != last:
            path.unlink(missing_ok=True)


class GrammarCrew:
    """All are started with the first answer that has a grammar, so that none has to wait for one later."""

    def __init__(self, spec: ChildSpec, vocab_size: int, most: int) -> None:
        """For the scheduler of this spec. At most `most` answers are followed at a time."""
        cores = (len(os.sched_getaffinity(0)) - _OTHER_CORES) // spec.config.data_parallel_size
        count = max(1, min(cores // _CORES_EACH, _MOST))
        self._rows_each = -(-most // count)
        folder, place = spec.addresses.directory, f"{spec.replica}-{spec.incarnation}"
        self.mask_table = f"{folder}/masks-{place}"
        _forget_tables(Path(folder), spec.replica)
        num_rows = count * self._rows_each
        asked = GrammarSpec("", spec.own.scheduler, self.mask_table, num_rows, spec.paths.model, vocab_size)
        names = (f"ipc://{folder}/m{place}-{number}" for number in itertools.count())
        self._links = [
            GrammarLink(asked, names, itertools.count(index, count), range(first, first + self._rows_each))
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
