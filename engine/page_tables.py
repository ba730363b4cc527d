"""Which pages requests hold: in each page table, from the first that its layers still see. Pure.

Layers with a window see a part of what there is, so they have page tables of their own, and what windows have left
behind is given back. All tables take their pages from one pool: layers of different tables use the same memory.

It knows the pool and what it remembers; it knows no queue, and makes no plans.
"""

from collections.abc import Sequence

from tercet.engine.held_pages import Held
from tercet.engine.page_need import PageNeed
from tercet.engine.pages import PagePool
from tercet.engine.plan_draft import PlanDraft
from tercet.engine.planner_settings import PlannerSettings


class PageTables:
    """Of all requests."""

    def __init__(self, settings: PlannerSettings) -> None:
        self.pool = PagePool(settings.num_pages, caching=settings.enable_prefix_caching)
        self.need: PageNeed = settings.need
        self._num_slots = settings.max_num_seqs + 1  # with that of padding

    def slot_of(self, row: int) -> int:
        """Whose a row of the page tables is: those of the slots of one table lie behind those of another."""
        return row % self._num_slots

    # ----------------------------------------------------------------------------- what is cached already

    def cached(self, hashes: Sequence[bytes]) -> tuple[list[Held], int]:
        """What one who goes on behind the longest prefix that is there has to hold of it, and does not hold yet: all of
        it, or what windows see. And how many pages are there in the tables of layers that see all."""
        end, found = len(hashes), dict[int, list[int]]()
        for table, window in enumerate(self.need.windows):
            if not window:
                found[table] = self.pool.find(_key(page_hash, table) for page_hash in hashes[:end])
                end = len(found[table])
        most = begin = end
        windowed = [table for table, window in enumerate(self.need.windows) if window]
        while windowed and begin > self._first_seen(end):
            begin -= 1
            if not all(_key(hashes[begin], table) in self.pool for table in windowed):
                end = begin
        tables = []
        for table, window in enumerate(self.need.windows):
            first = self.need.first_seen(window, end * self.need.page_size)
            seen = (_key(page_hash, table) for page_hash in hashes[first:end])
            tables.append(Held(first, self.pool.find(seen) if window else found[table][:end]))
            assert tables[-1].end == end
        return tables, most

    def nothing(self) -> list[Held]:
        """What one holds who begins anew."""
        return [Held() for _ in self.need.windows]

    def _first_seen(self, num_pages: int) -> int:
        """By any layer with a window, of a token right behind so many pages."""
        position = num_pages * self.need.page_size
        return min(self.need.first_seen(window, position) for window in self.need.windows if window)

    def shared_with(self, source: Sequence[Held], num_tokens: int) -> tuple[list[Held], list[int]] | None:
        """What one holds of its first tokens that another is to hold, too: full pages, and of each table one that both
        go on writing, if there is such a one. None: some of it is not there any longer."""
        num_full, rest = divmod(num_tokens, self.need.page_size)
        firsts = [self.need.first_seen(window, num_tokens) for window in self.need.windows]
        if any(held.first > first for held, first in zip(source, firsts, strict=True)):
            return None
        tables = [held.part(first, num_full) for held, first in zip(source, firsts, strict=True)]
        return tables, [held.pages[num_full - held.first] for held in source] if rest else []

    def remember(self, tables: Sequence[Held], first: int, hashes: Sequence[bytes]) -> None:
        """Pages from index `first` on are full and hold what their hashes say."""
        for table, held in enumerate(tables):
            for index in range(max(first, held.first), first + len(hashes)):
                self.pool.remember(held.pages[index - held.first], _key(hashes[index - first], table))

    # ------------------------------------------------------------------------------------ taking pages

    def num_lacking(self, tables: Sequence[Held], num_tokens: int) -> int:
        """Pages that one who comes needs beside those that it shares, `tables`, to have its tokens computed, counting
        those that it would take from what is kept."""
        num_pages = self.need.pages(num_tokens)
        lacking = 0
        for window, held in zip(self.need.windows, tables, strict=True):
            lacking += min(num_pages - held.end, self.need.held(window, num_pages) - len(held.pages))
            lacking += self.pool.num_kept(held.pages)
        return lacking

    def begin(
        self, slot: int, shared: Sequence[Held], copied: Sequence[int], num_tokens: int, draft: PlanDraft
    ) -> list[Held]:
        """A request enters with what it shares, and with pages for all of its tokens in the tables of layers that see
        all: in others it gets them part by part. `copied`: pages whose beginnings are its own, too."""
        for held in shared:  # all of them, before any page is taken
            self.pool.hold(held.pages)
        tables = []
        for table, (window, held) in enumerate(zip(self.need.windows, shared, strict=True)):
            own = Held(held.first)
            self._append(slot, table, own, held.pages, draft)
            wanted = len(copied[:1]) if window else self.need.pages(num_tokens) - held.end
            self._append(slot, table, own, self.pool.take(wanted), draft)
            tables.append(own)
        for page, own, held in zip(copied, tables, shared, strict=False):
            draft.copies.append((page, own.pages[len(held.pages)]))
        return tables

    def room(self, tables: Sequence[Held], start: int) -> int:
        """How many tokens from `start` on there are pages for, or could be."""
        ends = [held.end for window, held in zip(self.need.windows, tables, strict=True) if window]
        more = self.pool.num_available // len(ends) if ends else 0
        return (min(ends, default=tables[0].end) + more) * self.need.page_size - start

    def grow(self, slot: int, tables: Sequence[Held], num_tokens: int, draft: PlanDraft) -> int:
        """Pages for so many tokens, all or none; returns how many are lacking."""
        wanted = [max(self.need.pages(num_tokens) - held.end, 0) for held in tables]
        if sum(wanted) > self.pool.num_available:
            return sum(wanted)
        for table, (held, more) in enumerate(zip(tables, wanted, strict=True)):
            self._append(slot, table, held, self.pool.take(more), draft)
        return 0

    def _append(self, slot: int, table: int, held: Held, pages: list[int], draft: PlanDraft) -> None:
        row = slot + table * self._num_slots
        draft.pages += [(row, held.end + index, page) for index, page in enumerate(pages)]
        held.pages += pages

    # ------------------------------------------------------------------------------------ giving back

    def leave_behind(self, tables: Sequence[Held], position: int, lasting: Sequence[int]) -> None:
        """No plan from now on computes tokens ahead of `position`: what they alone would see is given back at once. Who
        gets it writes to it in plans behind all that read it.

        `lasting`: numbers of pages behind which others may go on; what is seen from there is not the first to go.
        """
        for window, held in zip(self.need.windows, tables, strict=True):
            first = self.need.first_seen(window, position)
            if (count := min(first, held.end) - held.first) <= 0:
                continue
            seen = [(self.need.first_seen(window, end * self.need.page_size), end) for end in lasting]
            for index, page in enumerate(held.pages[:count], held.first):
                self.pool.give_back([page], first_to_go=not any(first <= index < end for first, end in seen))
            del held.pages[:count]
            held.first += count

    def give_back(self, tables: Sequence[Held]) -> None:
        for held in tables:
            self.pool.give_back(held.pages)

    def num_given_back(self, tables: Sequence[Held]) -> int:
        """How many more pages would be available."""
        return sum(self.pool.num_given_back(held.pages) for held in tables)


def _key(page_hash: bytes, table: int) -> bytes:
    """By which a page of a table is remembered. Of the first one it is the hash itself."""
    return page_hash + bytes([table]) if table else page_hash
