"""One request's life, as the scheduler sees it: waiting, running in a slot, ended.

It knows its tokens and its pages, and of other requests only those that answer the same prompt; no step, no clock.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from tercet.engine.held_pages import Held
from tercet.engine.pages import PrefixHasher
from tercet.ipc.answers import FinishReason, Usage
from tercet.ipc.images import PlacedImage
from tercet.ipc.step_messages import Sampling, Submit


@dataclass(eq=False)
class Family:
    """What answers to one prompt know of each other: who computes it, and whose pages hold it."""

    computing: "Request | None" = None
    """It runs, and its prompt is not in any plan yet, or in part."""
    sources: list["Request"] = field(default_factory=list)
    """They run, and plans made so far compute their prompts."""
    has_begun: bool = False

    @property
    def waits(self) -> bool:
        """Whether it is better to wait than to compute the prompt once more."""
        return self.computing is not None and not self.sources

    def enter(self, request: "Request", *, helps: bool = True) -> None:
        """It has got a slot. `helps`: what it computes of the prompt can serve the others."""
        self.has_begun = True
        if helps and not self.sources:
            self.computing = request

    def has_prompt(self, request: "Request") -> None:
        """Plans made so far compute all that it brought."""
        self.sources.append(request)
        self.computing = None

    def leave(self, request: "Request") -> None:
        """It is about to lose its slot."""
        if request in self.sources:
            self.sources.remove(request)
        if request is self.computing:
            self.computing = None


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
    tables: list[Held] = field(default_factory=list)
    """What it holds, of each page table."""
    lasting: tuple[int, ...] = ()
    """Numbers of pages behind which others may go on."""
    num_remembered: int = 0
    """Pages that the pool knows by hash."""
    cuts: list[int] = field(default_factory=list)
    """Positions at which chunks end, so that the state there is kept."""
    admitted: float | None = None
    first_token: float | None = None
    num_cached: int = 0
    has_looked: bool = False
    """The host's memory was looked through for pages of its prompt, since it has been in line."""
    num_loaded: int = 0
    """Pages that came from there."""
    num_preemptions: int = 0
    priority: int = 0
    """Lower goes first."""
    queue_timeout: float | None = None
    expires: float = math.inf
    """When it has waited for its slot for `queue_timeout`."""
    num_told: int = 0
    """Generated tokens that are out already: when they are generated once more, nobody is told."""
    keeps_tokens: bool = False
    """Some of them were generated with other weights, which would generate others."""
    is_suspect: bool = False
    """It ran when the workers died, and has not yet been seen to survive what was planned of it then."""
    num_in_doubt: int = 0
    """Tokens known or planned when workers died: with one more it has survived all that they may have died of."""
    family: Family | None = None
    """Of answers to one prompt; None where there is only one."""
    is_sibling: bool = False
    """Another of its family came first, and will have computed the prompt."""
    images: tuple[PlacedImage, ...] = ()
    """Of the prompt. It has them until it ends: after a preemption they are looked at again."""

    def __post_init__(self) -> None:
        self._all_ids = self.token_ids
        """With those that are generated once more."""

    @property
    def turn(self) -> tuple[bool, int, int]:
        """Whose is lower goes first: suspects, then by priority, then by age."""
        return not self.is_suspect, self.priority, self.number

    @property
    def num_to_compute(self) -> int:
        """Tokens, as can be known before it runs. The last one of a prompt is always computed."""
        return len(self.token_ids) - (self.num_prompt - 1 if self.is_sibling else 0)

    def has_expired(self, now: float) -> bool:
        """Whether it has waited in vain; a request whose first answer has begun has not."""
        return self.expires <= now and not (self.family is not None and self.family.has_begun)

    @property
    def num_generated(self) -> int:
        """Tokens of the answer that there have been."""
        return max(self.num_told, len(self.token_ids) - self.num_prompt)

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
        if len(token_ids) > len(self._all_ids):
            self._all_ids = token_ids
        self.token_ids = token_ids[: self.num_prompt] if again and not self.keeps_tokens else self._all_ids

    def keep_tokens(self) -> None:
        """Run from all of them on, now and later."""
        self.keeps_tokens, self.token_ids = True, self._all_ids

    def images_behind(self, num_cached: int) -> tuple[PlacedImage, ...]:
        """As workers need them that have so many tokens in the cache: without the pixels of those that lie in these."""
        return tuple(
            image if image.first + image.num_tokens > num_cached else structs.replace(image, pixels=b"")
            for image in self.images
        )

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


def make_requests(message: Submit, hasher: PrefixHasher | None, now: float, *, again: bool = False) -> list[Request]:
    """The answers that a message asks for, with the full pages of what they bring hashed. `again`: as of `bring`."""
    prompt_ids = np.frombuffer(message.prompt_ids, np.int32)
    root = b"" if hasher is None else hasher.root(message.cache_salt, message.sampling.adapter_load)
    hashes = extended_hashes([root], hasher, prompt_ids)
    arrived = now - message.waited
    expires = math.inf if message.queue_timeout is None else arrived + message.queue_timeout
    family = Family() if message.siblings else None
    of_siblings = structs.replace(message.sampling, prompt_logprobs=None)
    answers = [(message.number, message.sampling, message.generated_ids)]
    for one in message.siblings:
        answers.append((one.number, structs.replace(of_siblings, seed=one.seed), one.generated_ids))
    requests: list[Request] = []
    for number, sampling, generated_ids in answers:
        token_ids = prompt_ids  # one for all: there may be 256 answers, and 100,000 tokens
        if generated_ids:
            token_ids = np.concatenate([prompt_ids, np.frombuffer(generated_ids, np.int32)])
        request = Request(
            number=number,
            sampling=sampling,
            num_prompt=len(prompt_ids),
            token_ids=token_ids,
            arrived=arrived,
            hashes=extended_hashes(hashes, hasher, token_ids),
            priority=message.priority,
            queue_timeout=message.queue_timeout,
            expires=expires,
            family=family,
            is_sibling=bool(requests),
            images=message.images,
        )
        request.keeps_tokens = bool(generated_ids) and not again
        request.bring(token_ids, again=again)
        requests.append(request)
    return requests


def extended_hashes(hashes: list[bytes], hasher: PrefixHasher | None, token_ids: NDArray[np.int32]) -> list[bytes]:
    """`hashes`, and those of the full pages of `token_ids` (all tokens so far) that are not among them.

    Without a hasher, where no prefix is cached, none has a hash.
    """
    if hasher is None:
        return hashes.copy()
    return [*hashes, *hasher.chain(hashes[-1], token_ids[(len(hashes) - 1) * hasher.page_size :])]


def end_reason(token_id: int, request: Request, length: int) -> tuple[FinishReason, int | None] | None:
    """Why a request of `length` tokens ends with `token_id` as its last, if it does."""
    if length >= request.min_length and token_id in memoryview(request.sampling.stop_ids).cast("i"):
        return "stop", token_id
    return ("length", None) if length >= request.max_length else None
