"""When requests have had their time. Pure: no clock but the argument `now`."""

import heapq

from tercet.engine.live import Asked


class Deadlines:
    """Those that have ended since stay in it for a while."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Asked, float]] = []

    def give(self, asked: Asked, seconds: float, now: float, num_live: int) -> None:
        """It has so many seconds in all, as one of so many."""
        if len(self._heap) > 2 * num_live + 64:
            self._heap = [one for one in self._heap if one[2].answers]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (now + seconds, asked.answers[0].number, asked, seconds))

    def passed(self, now: float) -> list[tuple[Asked, float]]:
        """Those that live and have had their time, and how much it was; each once."""
        late = []
        while self._heap and self._heap[0][0] <= now:
            _, _, asked, seconds = heapq.heappop(self._heap)
            if asked.answers:
                late.append((asked, seconds))
        return late
