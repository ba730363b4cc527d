"""States on their way between the workers' places for copies and the host's memory, where a model carries some. Pure.

What pages are to `swaps.py`, which says when copies are made and who waits for them: a state is stored once the plan
that copied it to its place is complete, and loaded into a place that no plan from then on names. What is copied is held
meanwhile. It knows prefixes and places; it knows no request, and no page.
"""

from dataclasses import dataclass, field

from tercet.engine.host_pages import HostPages
from tercet.engine.kept_states import KeptStates

MOST_STORED = 4
"""By one swap: a state takes as much as some twenty pages."""


@dataclass
class StateCopies:
    """Those of one swap; or what of a state it needs where it is."""

    prefixes: list[bytes] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)
    """Of each where it is and where it goes; none where it stays."""


class StateSwaps:
    """All of a replica's. `num_places`: in the host's memory."""

    def __init__(self, num_places: int, kept: KeptStates) -> None:
        self._kept = kept
        self._host = HostPages(num_places)
        self._new: dict[int, bytes] = {}
        """Places, and whose states are copied there by a plan that is made or in the making."""
        self._unstored: dict[int, tuple[int, bytes]] = {}
        """By place, of the last that was copied there: the plan that has to be complete, and the prefix."""
        self._coming: set[bytes] = set()

    def could_have(self, prefix: bytes) -> bool:
        """Whether it is kept, or could be if it were waited for."""
        if prefix in self._kept or prefix in self._coming:
            return True
        return self._host.holds(prefix) and self._kept.has_room

    # ------------------------------------------------------------------------------------------- plans

    def copied(self, given: dict[bytes, int]) -> None:
        """The plan in the making copies states to these places."""
        self._new |= {place: prefix for prefix, place in given.items()}

    def used(self, prefix: bytes, place: int) -> None:
        """By the plan in the making somebody begins from it: what has gone on the host is to be stored again."""
        self._host.use([prefix])
        if prefix not in self._host and self._unstored.get(place, (0, b""))[1] != prefix:
            self._new[place] = prefix

    def planned(self, plan: int) -> None:
        """Plan `plan` is the last that was made."""
        for place, prefix in self._new.items():
            self._unstored.pop(place, None)  # who comes later is stored later
            self._unstored[place] = plan, prefix
        self._new.clear()

    # ------------------------------------------------------------------------------------------- swaps

    def stores(self, completed: int) -> StateCopies:
        """Those to be stored now, behind plan `completed`."""
        copies = StateCopies()
        while self._unstored and len(copies.pairs) < MOST_STORED:
            place, (plan, prefix) = next(iter(self._unstored.items()))
            if plan > completed:
                break
            del self._unstored[place]
            # By now the place may be another's, or the host may have got the state from another.
            if self._kept.at(prefix) != place or prefix in self._host:
                continue
            if (at := self._host.store(prefix)) is not None:
                self._kept.hold(prefix)
                copies.prefixes.append(prefix)
                copies.pairs.append((place, at))
        return copies

    def stored(self, copies: StateCopies) -> None:
        """They are there."""
        self._host.stored(copies.prefixes)
        for prefix in copies.prefixes:
            self._kept.let_go(prefix)

    def load(self, prefix: bytes) -> StateCopies:
        """It is kept, until `loaded`; from the host, if it is not."""
        if prefix in self._kept:
            self._kept.hold(prefix)
            return StateCopies([prefix])
        self._coming.add(prefix)
        return StateCopies([prefix], [(self._host.read(prefix), self._kept.take())])

    def loaded(self, copies: StateCopies) -> None:
        """All that it was to be beside is there."""
        if not copies.pairs:
            for prefix in copies.prefixes:
                self._kept.let_go(prefix)
        for prefix, (_, place) in zip(copies.prefixes, copies.pairs, strict=False):
            self._coming.remove(prefix)
            self._host.was_read([prefix])
            self._kept.came(prefix, place)
