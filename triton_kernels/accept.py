"""Which guesses were right: each is compared with the token that was sampled for its position.

What is sampled for a position depends on the tokens before it and on the request's seed. So a guess that is the sampled
token changes nothing, and the token sampled behind it is what a step of its own would have sampled; behind the first
wrong guess, nothing counts. `trials.py` laid the rows out, and whoever sampled them has written tokens into the table
and said of slots how long they are as if each row were a slot's only one: that is put right here.

Shape suffixes: B slots, N tokens of each, T tokens of the step; R places of a ring, E stop ids of a slot.
"""

import triton
import triton.language as tl

from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.sample import TokenRing
from tercet.triton_kernels.slot_table import MAX_STOP_IDS, SlotTable
from tercet.triton_kernels.tiles import next_power_of_2
from tercet.triton_kernels.trials import Trials

WRONG = -2
"""Instead of the token of a row that was behind a wrong guess, or behind its request's end."""
_SIZES = ["S", "L", "place_size"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _accept_kernel(
    slots_ptr, input_ids_ptr, positions_ptr, token_ids_ptr, length_ptr, max_length_ptr, min_length_ptr, done_ptr,
    stop_ids_ptr, places_ptr, turn_ptr, S, L, place_size,
    N: tl.constexpr, BLOCK_N: tl.constexpr, E: tl.constexpr, WRONG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B,): one program owns a slot's rows, how long the slot is, and whether it is done."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    slot = tl.load(slots_ptr + tl.program_id(0))
    inside = (slot >= 0) & (slot < S)
    place = tl.arange(0, BLOCK_N)
    rows = tl.program_id(0) * N + place
    position = tl.load(positions_ptr + rows, mask=inside & (place < N), other=-1)
    tried = (position >= 0) & (position < L)
    token = tl.load(token_ids_ptr + slot.to(tl.int64) * L + position, mask=tried, other=-1)
    next_tried = tl.load(positions_ptr + rows + 1, mask=inside & (place + 1 < N), other=-1) >= 0
    right = next_tried & (tl.load(input_ids_ptr + rows + 1, mask=next_tried, other=-1) == token)
    stop_ids = tl.load(stop_ids_ptr + slot * E + tl.arange(0, E), mask=inside, other=-1)
    stops = tl.sum((stop_ids[None, :] == token[:, None]).to(tl.int32), 1) > 0
    stops &= position >= tl.load(min_length_ptr + slot, mask=inside, other=0)
    most = tl.minimum(tl.load(max_length_ptr + slot, mask=inside, other=0), L)
    ends = tried & (stops | (position + 1 >= most))
    # Rows that have to hold for the one behind them to count.
    breaks = tl.where(right & ~ends, 0, 1)
    counts = tried & (tl.cumsum(breaks, 0) - breaks == 0)
    begin = tl.max(tl.where(place == 0, position, -1))
    if begin >= 0:
        tl.store(length_ptr + slot, begin + tl.sum(counts.to(tl.int32)))
        tl.store(done_ptr + slot, tl.max((counts & ends).to(tl.int32)))
    kept = tl.where(counts, token, tl.where(tried, WRONG, -1))
    tl.store(places_ptr + tl.load(turn_ptr) * place_size + rows, kept, mask=place < N)


def accept(ring: TokenRing, trials: Trials, table: SlotTable, *, num_guesses: int) -> None:
    """Of tokens sampled into the table, and the last place of `ring`, keep those that hold, as a slot's first does.

    The others become `WRONG` in the ring. Each slot is as long as what it keeps makes it, and is done if that ends it;
    behind its length the table holds anything. Graph-safe.
    """
    num_slots, T, N = len(trials.slots_B), len(trials.input_ids_T), num_guesses + 1
    if num_slots * N != T:
        raise ValueError(f"input_ids: got {T} tokens, wanted {N} for each of {num_slots} slots")
    if not use_kernels(trials.input_ids_T):
        accept_reference(ring, trials, table, num_guesses=num_guesses)
        return
    S, L = table.token_ids_SL.shape
    _accept_kernel[(num_slots,)](
        trials.slots_B, trials.input_ids_T, trials.next_positions_T, table.token_ids_SL, table.length_S,
        table.max_length_S, table.min_length_S, table.done_S, table.stop_ids_SE, ring.places_KR, ring.turn_1,
        S, L, ring.places_KR.shape[1], N=N, BLOCK_N=next_power_of_2(N), E=MAX_STOP_IDS, WRONG=WRONG, num_warps=1,
        **overlap_options(trials.input_ids_T),
    )  # fmt: skip


def accept_reference(ring: TokenRing, trials: Trials, table: SlotTable, *, num_guesses: int) -> None:
    """The same in plain Python."""
    N, L = num_guesses + 1, table.token_ids_SL.shape[1]
    places_T = ring.places_KR[int(ring.turn_1)]
    for first, slot in zip(range(0, len(trials.input_ids_T), N), trials.slots_B.tolist(), strict=True):
        positions = [position for position in trials.next_positions_T[first : first + N].tolist() if position >= 0]
        places_T[first : first + N] = -1
        if not positions:
            continue
        places_T[first : first + len(positions)] = WRONG
        stop_ids = set(table.stop_ids_SE[slot].tolist())
        most, least = min(int(table.max_length_S[slot]), L), int(table.min_length_S[slot])
        table.done_S[slot] = 0
        for row, position in enumerate(positions, first):
            token = int(table.token_ids_SL[slot, position])
            places_T[row] = token
            table.length_S[slot] = position + 1
            if (token in stop_ids and position >= least) or position + 1 >= most:
                table.done_S[slot] = 1
                break
            if position + 1 not in positions or int(trials.input_ids_T[row + 1]) != token:
                break
