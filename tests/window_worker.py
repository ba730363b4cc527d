"""The simulated worker with a page table for each group of layers: those with a window see a part of what there is.

Whatever lies ahead of a window may be another's by now; within it every key and value is checked. A page is any
table's, and what a table's layers left in it is nothing to another's.
"""

from collections import Counter

from simulated_worker import SimulatedWorker, identity, root
from tercet.engine.planner_settings import PlannerSettings
from tercet.ipc.step_messages import Step

Written = dict[tuple[int, int], bytes]


class WindowWorker(SimulatedWorker):
    def __init__(self, chosen: PlannerSettings) -> None:
        super().__init__(chosen.max_num_seqs, chosen.num_pages, chosen.page_size, chosen.max_num_batched_tokens)
        self._windows = chosen.windows
        self._planned_rows: dict[int, dict[int, int]] = {}
        """Of each row of the page tables, its pages, as plans have it that may not be executed yet."""
        self._rows_of_tables: dict[int, dict[int, int]] = {}
        """And as the worker has them."""
        self._has_begun: set[int] = set()
        """Slots whose plans are executed in part, since they were entered."""
        self.counts: Counter[str] = Counter()

    def _table_and_slot(self, row: int) -> tuple[int, int]:
        return divmod(row, self._num_slots + 1)

    def _row(self, table: int, slot: int) -> int:
        return table * (self._num_slots + 1) + slot

    def _check_slots(self, step: Step) -> None:
        super()._check_slots(step)
        for enter in step.enter:
            self._has_begun.discard(enter.slot)
            for table in range(len(self._windows)):
                self._planned_rows[self._row(table, enter.slot)] = {}

    def _check_pages(self, step: Step) -> None:
        """A page that a request will write is nobody's who may still see it, nor written by a plan in flight."""
        sources = {source for source, _ in self._copies(step)}
        fresh, copied = list[int](), set[int]()
        for row, index, page in self._triples(step):
            assert 0 < page < self._num_pages
            table, slot = self._table_and_slot(row)
            pages, num_cached = self._planned_rows[row], self._occupied[slot].num_cached
            assert index == (max(pages) + 1 if pages else index), "a page table has a gap"
            if not pages:
                assert index == 0 or (self._windows[table] and index * self._page_size <= num_cached)
            pages[index] = page
            if (index + 1) * self._page_size > num_cached:
                fresh.append(page)
            if index * self._page_size < num_cached < (index + 1) * self._page_size:
                copied.add(page)
        assert copied == {target for _, target in self._copies(step)}, "a part of a page is taken from the cache"
        seen = Counter(page for row in self._planned_rows for page in self._seen(row))
        for page in fresh:
            assert seen[page] <= 1, "a held page is given out"
            assert not any(page in read for read in self._read), "a page of a plan in flight changes hands"
        held = {page for pages in self._planned_rows.values() for page in pages.values()}
        assert sources <= held, "nobody holds what is copied"

    def _seen(self, row: int) -> list[int]:
        """Pages that its layers see, or write, from now on."""
        table, slot = self._table_and_slot(row)
        occupied = self._occupied.get(slot)
        if occupied is None:
            return []
        window, pages = self._windows[table], self._planned_rows[row]
        position = occupied.num_planned
        if position >= occupied.num_entered:  # of rows that decode plans know what was sampled so far
            position = (len(self._slots[slot].tokens) if slot in self._has_begun else occupied.num_entered) - 1
        first = max(position - window + 1, 0) // self._page_size if window else 0
        self.counts["left behind"] += sum(index < first for index in pages)
        return [page for index, page in pages.items() if index >= first]

    def issue(self, step: Step) -> None:
        super().issue(step)
        # What windows leave behind changes hands at once: plans in flight run first.
        full = [table for table, window in enumerate(self._windows) if not window]
        rows = [self._row(table, slot) for slot, _, _ in self._rows(step) for table in full]
        self._read[-1] = {page for row in rows for page in self._planned_rows[row].values()}

    def _apply(self, step: Step) -> None:
        for enter in step.enter:
            self._has_begun.add(enter.slot)
            for table in range(len(self._windows)):
                self._rows_of_tables[self._row(table, enter.slot)] = {}
        for row, index, page in self._triples(step):
            self._rows_of_tables[row][index] = page
        self.counts["copied"] += len(self._copies(step))
        super()._apply(self._without_pages(step))

    @staticmethod
    def _without_pages(step: Step) -> Step:
        return Step(**{**{name: getattr(step, name) for name in step.__struct_fields__}, "pages": b""})

    def _compute(self, slot_index: int, start: int, length: int, written: Written) -> bytes:
        slot = self._slots[slot_index]
        prefix = root(slot.sampling)
        for position in range(start + length):
            if slot.tokens[position] < 0:
                place = self._place(0, slot_index, position)
                slot.tokens[position] = self._last_of[self._cache[place]]
            prefix = identity(prefix, slot.tokens[position])
            for table, window in enumerate(self._windows):
                self._last_of[_of_table(prefix, table)] = slot.tokens[position]
                if position < start and (not window or position > start - window):
                    content = self._cache.get(self._place(table, slot_index, position))
                    assert content == _of_table(prefix, table), f"slot {slot_index} reads wrong K and V at {position}"
            if position >= start:
                self._write(slot_index, position, prefix, written)
        return prefix

    def _write(self, slot_index: int, position: int, prefix: bytes, written: Written) -> None:
        for table in range(len(self._windows)):
            written[self._place(table, slot_index, position)] = _of_table(prefix, table)

    def _place(self, table: int, slot: int, position: int) -> tuple[int, int]:
        page = self._rows_of_tables[self._row(table, slot)][position // self._page_size]
        return page, position % self._page_size


def _of_table(prefix: bytes, table: int) -> bytes:
    return prefix + bytes([table])
