"""What the tokens of a step mean to their requests: a beginning, a full page, an end. Pure; it makes no plans."""

from typing import NamedTuple, TypeVar

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from tercet.engine.pages import PrefixHasher
from tercet.engine.request import Request, end_reason, extended_hashes
from tercet.engine.residents import Residents
from tercet.engine.slot_arrays import SlotArrays
from tercet.ipc.beyond import PromptLogs, Vector
from tercet.ipc.step_messages import Ended, Started

OfPrompt = TypeVar("OfPrompt", PromptLogs, Vector)


class Turns(NamedTuple):
    """What is to be told, and who leaves."""

    ended: tuple[Ended, ...]
    started: tuple[Started, ...]
    leaving: list[Request]


def find_turns(
    residents: Residents,
    hasher: PrefixHasher | None,
    page_size: int,
    slots: NDArray[np.int32],
    lengths: NDArray[np.int32],
    token_ids: NDArray[np.int32],
    now: float,
) -> Turns:
    """Of slots with one more token each, and so many in all. Full pages are remembered on the way."""
    arrays = residents.slots
    first = arrays.that_begin(slots, lengths)
    full = lengths % page_size == 1  # the page before this token is full, and computed
    ends = arrays.that_may_end(slots, lengths, token_ids)
    ended, started, leaving = [], [], []
    for row in np.flatnonzero(ends | full | first).tolist():
        request = residents.at(slots[row])
        assert request is not None
        length = int(lengths[row])
        if request.first_token is None:
            request.first_token = now
            usage = request.usage(length, now)
            started.append(Started(request.number, usage.num_cached_tokens, usage.queued_s, usage.prefill_s))
        if full[row]:
            request.hashes = extended_hashes(request.hashes, hasher, arrays.tokens[request.slot, :length])
            residents.remember(request, length)
        if ends[row] and (reason := end_reason(int(token_ids[row]), request, length)):
            ended.append(Ended(request.number, *reason, request.usage(length, now)))
            leaving.append(request)
    return Turns(tuple(ended), tuple(started), leaving)


def said_of_prompts(said: tuple[OfPrompt, ...], slots: NDArray[np.int32], arrays: SlotArrays) -> tuple[OfPrompt, ...]:
    """What a step of these slots says of prompts, under the numbers of requests that are still wanted."""
    return tuple(
        structs.replace(one, row=int(arrays.number[slots[one.row]])) for one in said if arrays.alive[slots[one.row]]
    )
