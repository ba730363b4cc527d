"""The gauges of all replicas' schedulers: as one engine's, and as a client sees them. Pure."""

from collections.abc import Sequence

from tercet.ipc.answers import Gauges
from tercet.ipc.step_messages import Load

_NUMBERS = Gauges.__struct_fields__


def all_together(loads: Sequence[Load]) -> Load:
    """Sums. Of pages, page 0, which is nobody's, is counted once: all are free if all others are, as in one cache."""
    if len(loads) == 1:
        return loads[0]
    sums = {name: sum(getattr(load, name) for load in loads) for name in _NUMBERS}
    return Load(**{**sums, "num_pages": sums["num_pages"] - len(loads) + 1})


def gauges(load: Load) -> Gauges:
    """One replica's."""
    return Gauges(**{name: getattr(load, name) for name in _NUMBERS})
