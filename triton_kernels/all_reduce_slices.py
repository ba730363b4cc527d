"""A row's sum over more than two ranks, in two hops: less leaves a rank than if each sent all it has to each other.

A row is cut into a slice for each rank, its owner. First everybody sends each owner its slice; owners add, in rank
order, and round once; then they send everybody the sum. What leaves a rank is 2 (P - 1) / P rows instead of P - 1, and
every program of every rank has as much to do.

Inboxes are those of `all_reduce_rows.py`, and so is the way of a slice: stored, released behind a barrier with the flag
of its row, by one thread for each peer and to all at once, and acquired. The place of source s at rank r takes first
the part that r adds and then, in other columns, the sum from s: the hops of a call never overwrite each other. Flags
count hops, 2 n and 2 n + 1 in call n. One may say the second while the first is waited for, which then is there too. A
rank's place in its own inbox takes its own slices, so that adding and reading need no cases.

Two turns of places suffice here as well: whoever begins call n has received call n - 1 from every rank, each of which
had by then ended call n - 2 and read what is now overwritten. And large grids end: the first hop is sent before
anything is waited for, so the first row that is not done gets all of it on every rank; so all of the second hop is
sent, and nothing else is waited for.

Shape suffixes: P ranks, M rows that an inbox has places for.
"""

import triton
import triton.language as tl

from tercet.triton_kernels.row_places import flag_ptr, place_ptr


@triton.jit
def sum_by_slices(
    x, row, columns, mask, addresses, calls_ptr, M,
    D: tl.constexpr, RANK: tl.constexpr, P: tl.constexpr, PLACE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Exchange one row; its sum over ranks in rank order, rounded."""
    call = tl.load(calls_ptr + row) + 1
    # Of whole wide words, the last one shorter or none.
    ALIGN: tl.constexpr = 128 // TYPE.primitive_bitwidth
    SLICE: tl.constexpr = (D + P * ALIGN - 1) // (P * ALIGN) * ALIGN
    owners = columns // SLICE
    for peer in tl.static_range(P):
        ptrs = place_ptr(addresses[peer], call, RANK, row, columns, M, P, PLACE, TYPE)
        tl.store(ptrs, x, mask=mask & (owners == peer))
    _release(call * 2, call, row, addresses, M, RANK, P, PLACE, TYPE)
    tl.store(calls_ptr + row, call)  # behind the barrier: every warp has read it
    _acquire(call * 2, call, row, addresses, M, RANK, P, PLACE, TYPE)

    offsets = tl.arange(0, triton.next_power_of_2(SLICE))
    own_columns = RANK * SLICE + offsets
    own_mask = (offsets < SLICE) & (own_columns < D)
    total = tl.zeros(offsets.shape, tl.float32)
    for source in tl.static_range(P):
        ptrs = place_ptr(addresses[RANK], call, source, row, own_columns, M, P, PLACE, TYPE)
        total += tl.load(ptrs, mask=own_mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    for peer in tl.static_range(P):
        ptrs = place_ptr(addresses[peer], call, RANK, row, own_columns, M, P, PLACE, TYPE)
        tl.store(ptrs, total.to(TYPE), mask=own_mask)
    _release(call * 2 + 1, call, row, addresses, M, RANK, P, PLACE, TYPE)
    _acquire(call * 2 + 1, call, row, addresses, M, RANK, P, PLACE, TYPE)
    ptrs = place_ptr(addresses[RANK], call, owners, row, columns, M, P, PLACE, TYPE)
    return tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def _release(
    hop, call, row, addresses, M, RANK: tl.constexpr, P: tl.constexpr, PLACE: tl.constexpr, TYPE: tl.constexpr
):  # fmt: skip
    """Tell the others that they may read what has been stored for this hop."""
    peers = tl.arange(0, triton.next_power_of_2(P))
    address = tl.zeros(peers.shape, tl.int64)
    for peer in tl.static_range(P):
        address = tl.where(peers == peer, addresses[peer], address)
    # Every warp has stored its part: only now may one thread a peer release them all.
    tl.debug_barrier()
    flag_ptrs = flag_ptr(address, call, RANK, row, M, P, PLACE, TYPE)
    tl.atomic_xchg(flag_ptrs, hop, mask=(peers < P) & (peers != RANK), sem="release", scope="sys")


@triton.jit
def _acquire(
    hop, call, row, addresses, M, RANK: tl.constexpr, P: tl.constexpr, PLACE: tl.constexpr, TYPE: tl.constexpr
):  # fmt: skip
    """Wait until what every other rank has sent in this hop has come and may be read."""
    sources = tl.arange(0, triton.next_power_of_2(P))
    others = (sources < P) & (sources != RANK)
    flag_ptrs = flag_ptr(addresses[RANK], call, sources, row, M, P, PLACE, TYPE)
    missing = 1
    while missing > 0:
        # The addition is there to acquire, by one thread a source and from all at once.
        flags = tl.atomic_add(flag_ptrs, 0, mask=others, sem="acquire", scope="sys")
        missing = tl.sum(((flags - hop < 0) & others).to(tl.int32))
    # A few threads have acquired: the others come behind them.
    tl.debug_barrier()
