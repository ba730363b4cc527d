"""How the host's memory is divided: places for copies of pages, and of states, where a model's layers carry some.

Knows bytes and shapes; what is copied to which place is the scheduler's matter.
"""

from math import prod
from typing import NamedTuple

from torch import Tensor

from tercet.model.host_memory import HostMemory
from tercet.model.kv_cache import KvCache, page_size_of, size_text
from tercet.model.parallel import Group
from tercet.model.states import States

_CHAT_TOKENS = 4096
"""Of which a state and the pages are kept alike: shorter chats find fewer states than pages, longer ones more."""


class HostPlaces(NamedTuple):
    """Of one rank; the first dimension is that of places."""

    pages: tuple[Tensor, ...]
    """Of each of the cache's blocks: [place, layer, k/v, kv head, token, dim]."""
    tails: Tensor | None = None
    """As `States` has them, [place, layer, ...]: of as many states as there are places for."""
    states: Tensor | None = None

    @property
    def num_pages(self) -> int:
        return len(self.pages[0])

    @property
    def page_bytes(self) -> int:
        return sum(block[0].nbytes for block in self.pages)

    @property
    def num_states(self) -> int:
        return 0 if self.states is None else len(self.states)

    @property
    def state_bytes(self) -> int:
        return 0 if self.tails is None or self.states is None else self.tails[0].nbytes + self.states[0].nbytes


def divide(memory: HostMemory, kv_cache: KvCache, states: States | None, group: Group) -> HostPlaces:
    """As many places as every rank has room for, once the memory is there: where there are states, one for each of them
    beside those for the pages of so long a chat. ValueError where the system has too little, or this is too little for
    one of each."""
    page_bytes, page_size = sum(block[:, :, 0].nbytes for block in kv_cache.blocks), page_size_of(kv_cache.layers)
    if states is None:
        num_pages = _checked(memory, group.min(memory.num_bytes // page_bytes), page_size, page_bytes, 0)
        return HostPlaces(_pages(memory, kv_cache, num_pages))
    tails, whole = states.tails_LSTC, states.states_LSHDV
    tail_shape, state_shape = ((one.shape[0], *one.shape[2:]) for one in (tails, whole))
    state_bytes = states.nbytes // tails.shape[1]
    pages_beside = -(-_CHAT_TOKENS // page_size)
    num_states = group.min(max(memory.num_bytes // (state_bytes + pages_beside * page_bytes), 1))
    num_pages = group.min((memory.num_bytes - num_states * state_bytes) // page_bytes)
    num_pages = _checked(memory, num_pages, page_size, page_bytes, state_bytes)
    first = num_pages * page_bytes  # a whole number of tiles: what follows is aligned
    behind = first + num_states * prod(state_shape) * whole.itemsize
    return HostPlaces(
        _pages(memory, kv_cache, num_pages),
        memory.places((num_states, *tail_shape), tails.dtype, behind),
        memory.places((num_states, *state_shape), whole.dtype, first),
    )


def _pages(memory: HostMemory, kv_cache: KvCache, num_pages: int) -> tuple[Tensor, ...]:
    """Places of each block behind those of the one before."""
    places: list[Tensor] = []
    for block in kv_cache.blocks:
        shape, first = (num_pages, *block.shape[:2], *block.shape[3:]), sum(place.nbytes for place in places)
        places.append(memory.places(shape, block.dtype, first))
    return tuple(places)


def _checked(memory: HostMemory, num_pages: int, page_size: int, page_bytes: int, state_bytes: int) -> int:
    if num_pages > 0:
        return num_pages
    of_each = f"a page of {page_size} tokens takes {size_text(page_bytes)}"
    if state_bytes:
        of_each = f"{of_each} and a state {size_text(state_bytes)}"
    raise ValueError(f"{memory.wanted}, and {of_each}: want room for one at least, as in 64GiB")
