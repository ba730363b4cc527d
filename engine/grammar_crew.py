"""The processes that compute masks, each of which follows some of the answers: one takes a mask after the other, and a
step of many answers would wait for it. Knows answers and links; which process lives, each link knows.
"""

import itertools
import os
from collections import deque
from collections.abc import Iterable, Sequence

from tercet.engine.grammar_link import Followed, GrammarLink
from tercet.engine.grammar_process import GrammarSpec
from tercet.ipc.addresses import Addresses
from tercet.ipc.step_messages import Allowed, Disallowed

_MOST = 4
_CORES_EACH = 4
"""Each reads the tokenizer for itself, and the rest of the engine wants cores, too."""


class GrammarCrew:
    """All are started with the first answer that has a grammar, so that none has to wait for one later."""

    def __init__(self, addresses: Addresses, incarnation: int, model_path: str, vocab_size: int, most: int) -> None:
        """At most `most` answers are followed at a time."""
        count = max(1, min(len(os.sched_getaffinity(0)) // _CORES_EACH, _MOST))
        self.mask_table = f"{addresses.directory}/masks-{incarnation}"
        spec = GrammarSpec("", addresses.scheduler, self.mask_table, most, model_path, vocab_size)
        names = (f"ipc://{addresses.directory}/m{incarnation}-{number}" for number in itertools.count())
        self._links = [GrammarLink(spec, names, itertools.count(index, count)) for index in range(count)]
        self._owner: dict[Followed, GrammarLink] = {}
        self._free_rows = deque(range(most))
        """That which is free for longest is taken first: plans that name it may still be in flight."""

    def follow(self, grammar: str, token_ids: Sequence[int]) -> Followed:
        """Ask what may come after these tokens of an answer."""
        for link in self._links:
            link.start()
        link = min(self._links, key=lambda link: link.num_followed)
        followed = link.follow(self._free_rows.popleft(), grammar, token_ids)
        self._owner[followed] = link
        return followed

    def extend(self, answers: Iterable[tuple[Followed, int]]) -> None:
        """Ask what may come after one more token of each of these."""
        shares: dict[GrammarLink, list[tuple[Followed, int]]] = {}
        for followed, token_id in answers:
            shares.setdefault(self._owner[followed], []).append((followed, token_id))
        for link, share in shares.items():
            link.extend(share)

    def release(self, followed: Followed) -> None:
        """Nobody wants to know more of this one."""
        self._owner.pop(followed).release(followed)
        self._free_rows.append(followed.row)

    def take(self, message: Allowed | Disallowed) -> list[Followed]:
        """Those that have a mask now, or fail."""
        return self._links[message.first_ticket % len(self._links)].take(message)

    def check(self) -> list[Followed]:
        """See whether all live and get on; call it now and then. Returns those that fail."""
        return [failed for link in self._links for failed in link.check()]
