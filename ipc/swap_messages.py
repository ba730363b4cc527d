"""Messages between the scheduler and the workers about pages and states that have a copy in the host's memory.

The engine's own, as those in `step_messages.py`. They go the same ways as steps and their answers, and say nothing of
steps but which of them one has to be behind.
"""

import msgspec


class Swap(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Copy pages and states to the host's memory or back, beside the steps, in the order of these messages."""

    number: int
    """1, 2, …"""
    epoch: int
    completed: int
    """The last step that is known to be complete, -1 for none. On each rank the copies are made behind it: nothing that
    comes later writes to these pages and places, and what wrote to them, or reads what is written over, is complete
    with that."""
    stores: bytes = b""
    """int32 pairs: page, and place in the host's memory that becomes its copy."""
    loads: bytes = b""
    """int32 pairs: place, and page that becomes its copy."""
    stored_states: bytes = b""
    """int32 pairs: place of a state that is kept, and place for states in the host's memory that becomes its copy."""
    loaded_states: bytes = b""
    """int32 pairs: place there, and place of those that are kept that becomes its copy."""


class Swapped(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Copies are made, on rank 0."""

    number: int
    epoch: int
