"""Which place holds a copy of the state behind which prefix, and which copy goes when another comes. Pure.

It knows places and hashes of prefixes, as `pages.py` makes them; it knows no slot and no plan.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection


class KeptStates:
    """`count` places, numbered from `first` on."""

    def __init__(self, first: int, count: int) -> None:
        self._free = list(range(first + count - 1, first - 1, -1))
        self._place_of: OrderedDict[bytes, int] = OrderedDict()
        """Least recently used first."""
        self._held: Counter[bytes] = Counter()
        """By how many."""

    def __contains__(self, prefix: bytes) -> bool:
        return prefix in self._place_of

    def at(self, prefix: bytes) -> int | None:
        """Where the state is, if it is kept."""
        return self._place_of.get(prefix)

    def use(self, prefix: bytes) -> int:
        """Where the state is that somebody begins from."""
        self._place_of.move_to_end(prefix)
        return self._place_of[prefix]

    def keep(self, prefixes: Collection[bytes]) -> dict[bytes, int]:
        """Places for states that are copied at the same time, each another. What is kept already gets none, nor does
        what there is no room for: none of these makes way for another."""
        given: dict[bytes, int] = {}
        for prefix in prefixes:
            if prefix in self._place_of:
                self._place_of.move_to_end(prefix)
                continue
            if (place := self._take(prefixes)) is None:
                break
            given[prefix] = self._place_of[prefix] = place
        return given

    # ----------------------------------------------------------------------- beside plans, on their way

    def hold(self, prefix: bytes) -> None:
        """One that is kept makes no way until `let_go`."""
        self._held[prefix] += 1

    def let_go(self, prefix: bytes) -> None:
        """One holder lets go."""
        self._held[prefix] -= 1
        if not self._held[prefix]:
            del self._held[prefix]

    @property
    def has_room(self) -> bool:
        """Whether there is a place to `take`."""
        return bool(self._free) or len(self._held) < len(self._place_of)

    def take(self) -> int:
        """A place for a state that comes from elsewhere, which is nobody's until `came`."""
        place = self._take(())
        assert place is not None, "all that are kept are held"
        return place

    def came(self, prefix: bytes, place: int) -> None:
        """It is there. If it was kept meanwhile, the place is free again."""
        if prefix in self._place_of:
            self._free.append(place)
        else:
            self._place_of[prefix] = place

    def _take(self, others: Collection[bytes]) -> int | None:
        """A free place, or that of the least recently used: not of these, nor of one that is held."""
        if self._free:
            return self._free.pop()
        oldest = next((one for one in self._place_of if one not in others and one not in self._held), None)
        return None if oldest is None else self._place_of.pop(oldest)
