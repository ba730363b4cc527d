"""One request's life, as the scheduler sees it: waiting, running in a slot, ended.

It knows its tokens and its pages; it knows no other request, no step and no clock.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tercet.engine.pages import PrefixHasher
from tercet.ipc.messages import FinishReason, Usage
from tercet.ipc.step_messages import Sampling, Submit


@dataclass(eq=False)
class Request:
    """Mutable, and owned by the planner."""

    number: int
    sampling: Sampling
    num_prompt: int
    token_ids: NDArray[np.int32]
    """What it has to compute when it enters a slot: the prompt, and after a preemption what it had generated too."""
    arrived: float
    hashes: list[bytes]
    """Of its full pages, as far as they are known. hashes[0] is the chain's root."""
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    num_remembered: int = 0
    """Pages that the pool knows by hash."""
    admitted: float | None = None
    first_token: float | None = None
    num_cached: int = 0
    num_preemptions: int = 0
    priority: int = 0
    """Lower goes first."""
    queue_timeout: float | None = None
    expires: float = math.inf
    """When it has waited for its slot for `queue_timeout`."""
    num_told: int = 0
    """Generated tokens that are out already: when they are generated once more, nobody is told."""
    is_suspect: bool = False
    """It ran when the workers died, and has not yet been seen to survive a step."""

    @property
    def max_length(self) -> int:
        return self.num_prompt + self.sampling.max_tokens

    @property
    def min_length(self) -> int:
        return self.num_prompt + self.sampling.min_tokens

    def bring(self, token_ids: NDArray[np.int32], *, again: bool) -> None:
        """Run from these tokens on; or, `again`, from the prompt: then each generated token keeps its bits too.

        A prompt's kernels do not sum as a decode step's do. What is generated again is the same, token by token.
        """
        self.num_told = max(self.num_told, len(token_ids) - self.num_prompt)
        self.token_ids = token_ids[: self.num_prompt] if again else token_ids

    def usage(self, length: int, now: float) -> Usage:
        """What it took, at its end."""
        admitted = now if self.admitted is None else self.admitted
        first = now if self.first_token is None else self.first_token
        return Usage(
            num_prompt_tokens=self.num_prompt,
            num_generated_tokens=length - self.num_prompt,
            num_cached_tokens=self.num_cached,
            num_preemptions=self.num_preemptions,
            queued_s=max(0.0, admitted - self.arrived),
            prefill_s=max(0.0, first - admitted),
            decode_s=max(0.0, now - first),
        )


def make_request(message: Submit, hasher: PrefixHasher | None, now: float, *, deterministic: bool = False) -> Request:
    """A request from its message, with the full pages of what it brings hashed."""
    token_ids = np.frombuffer(message.prompt_ids + message.generated_ids, np.int32)
    request = Request(
        number=message.number,
        sampling=message.sampling,
        num_prompt=len(message.prompt_ids) // 4,
        token_ids=token_ids,
        arrived=now,
        hashes=[hasher.root(message.cache_salt) if hasher is not None else b""],
        priority=message.priority,
        queue_timeout=message.queue_timeout,
        expires=math.inf if message.queue_timeout is None else now + message.queue_timeout,
    )
    extend_hashes(request, hasher, token_ids)
    request.bring(token_ids, again=deterministic)
    return request


def extend_hashes(request: Request, hasher: PrefixHasher | None, token_ids: NDArray[np.int32]) -> None:
    """Hash the full pages of `token_ids` (all of the request's tokens so far) that are not hashed yet.

    Without a hasher, where no prefix is cached, none has a hash.
    """
    if hasher is None:
        return
    size = hasher.page_size
    for page in range(len(request.hashes) - 1, len(token_ids) // size):
        request.hashes.append(hasher.next(request.hashes[-1], token_ids[page * size : (page + 1) * size]))


def end_reason(token_id: int, request: Request, length: int) -> tuple[FinishReason, int | None] | None:
    """Why a request of `length` tokens ends with `token_id` as its last, if it does."""
    if length >= request.min_length and token_id in np.frombuffer(request.sampling.stop_ids, np.int32):
        return "stop", token_id
    return ("length", None) if length >= request.max_length else None
