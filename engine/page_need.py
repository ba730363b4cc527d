"""How many pages a request needs, in all page tables together: of what windows have left behind, none. Pure arithmetic.

Layers that see the same number of tokens back may share a page table; each table has a page for as many tokens.
"""

from bisect import bisect_right
from typing import NamedTuple

from tercet.ipc.process_messages import Limits

KEYS_AT_ONCE = 128
"""Attention reads keys in tiles: it touches what lies so far ahead of a window, and makes nothing of it."""


def longest_request(limits: Limits, page_size: int) -> int:
    """Tokens, answer included, for which there is room; contexts may be longer. The last one's K and V are never
    wanted."""
    need = PageNeed(limits.windows, page_size, max(limits.image_tokens, 1))
    return need.most_tokens(limits.num_pages - 1, limits.max_model_len) + 1


class PageNeed(NamedTuple):
    """By the tables of a model."""

    windows: tuple[int, ...]
    """Of each page table, how many tokens back its layers see; 0: all."""
    page_size: int
    at_once: int
    """Tokens that may have to be computed in one step."""

    @property
    def num_windowed(self) -> int:
        return sum(window > 0 for window in self.windows)

    def pages(self, num_tokens: int) -> int:
        """Of one table, for so many tokens."""
        return -(-num_tokens // self.page_size)

    def first_seen(self, window: int, position: int) -> int:
        """Index of the first page that has something for a token at `position` to see."""
        if not window:
            return 0
        return max(position - window + 1, 0) // KEYS_AT_ONCE * KEYS_AT_ONCE // self.page_size

    def held(self, window: int, num_pages: int) -> int:
        """Pages of a table that have to be there at the same time, of a request of `num_pages`."""
        return min(num_pages, self.pages(window + KEYS_AT_ONCE) + self.pages(self.at_once) + 1) if window else num_pages

    def all_held(self, num_pages: int) -> int:
        """Of all tables."""
        return sum(self.held(window, num_pages) for window in self.windows)

    def most_tokens(self, num_pages: int, most: int) -> int:
        """Of the longest request, up to `most`, for which there is room in so many pages."""
        num_fitting = bisect_right(range(1, self.pages(most) + 1), num_pages, key=self.all_held)
        return num_fitting * self.page_size
