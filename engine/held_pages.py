"""The pages that one request holds in one page table. Pure."""

from dataclasses import dataclass, field


@dataclass
class Held:
    """By one request, in one page table."""

    first: int = 0
    """Index of the first page; of what is ahead of it nothing is held."""
    pages: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + len(self.pages)

    def part(self, first: int, end: int) -> "Held":
        """Some of it."""
        return Held(first, self.pages[first - self.first : end - self.first])
