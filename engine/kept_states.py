"""Which place holds a copy of the state behind which prefix, and which copy goes when another comes. Pure.

It knows places and hashes of prefixes, as `pages.py` makes them; it knows no slot and no plan.
"""

from collections import OrderedDict
from collections.abc import Collection


class KeptStates:
    """`count` places, numbered from `first` on."""

    def __init__(self, first: int, count: int) -> None:
        self._free = list(range(first + count - 1, first - 1, -1))
        self._place_of: OrderedDict[bytes, int] = OrderedDict()
        """Least recently used first."""

    def __contains__(self, prefix: bytes) -> bool:
        return prefix in self._place_of

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
            if not self._free:
                oldest = next((one for one in self._place_of if one not in prefixes), None)
                if oldest is None:
                    break
                self._free.append(self._place_of.pop(oldest))
            given[prefix] = self._place_of[prefix] = self._free.pop()
        return given
