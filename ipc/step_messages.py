"""Messages between the tokenizer, the scheduler and the workers, and the union each of them decodes.

As in `messages.py`: MessagePack arrays whose first element names the kind. The engine's own, versioned with it: nobody
outside speaks them.
"""

import msgspec

from tercet.ipc.answers import FinishReason, Usage
from tercet.ipc.beyond import Logs, PromptLogs, Vector
from tercet.ipc.grammar_messages import Allowed, Disallowed
from tercet.ipc.images import PlacedImage
from tercet.ipc.swap_messages import Swap, Swapped

# -------------------------------------------------------------------------------- tokenizer <-> scheduler


class Adjustments(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How the logits of a request are changed before sampling."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias_ids: bytes = b""
    """int32, each at most once."""
    biases: bytes = b""
    """fp32, one for each of `bias_ids`."""


class Embedding(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is made of the hidden state of a prompt's last token, behind the final norm."""

    dimensions: int
    """Its first so many numbers."""
    normalize: bool
    """Their length becomes 1."""
    classify: bool = False
    """Logits of the head that classifies are wanted instead."""


class Sampling(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """SamplingParams with every default resolved: what the scheduler and the workers need, and no text."""

    temperature: float
    top_k: int
    """0: all tokens."""
    top_p: float
    min_p: float
    seed: int
    """0 <= seed < 2**63."""
    max_tokens: int
    """At least 1; prompt and answer together fit the context."""
    min_tokens: int
    stop_ids: bytes
    """int32: any of these ends the request, once min_tokens are there."""
    adjustments: Adjustments | None = None
    logprobs: int | None = None
    """The log-probability of each sampled token is wanted, and those of so many of the likeliest."""
    prompt_logprobs: int | None = None
    """The same of each token of the prompt but the first."""
    grammar: str | None = None
    """What the answer has to match, as the scheduler's library reads it."""
    open_ended: bool = False
    """Nobody asked for max_tokens: it is all the room there was. If a restart leaves less, that is enough."""
    embedding: Embedding | None = None
    """It is wanted; the one token that is sampled behind the prompt is nobody's."""
    adapter: int = -1
    """In which place are the weights that are added, and which load of an adapter that was; -1: none are."""
    adapter_load: int = -1


class Sibling(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One more answer to a prompt: another seed, all else as in the `Submit` that brings it."""

    number: int
    seed: int
    generated_ids: bytes = b""


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """A validated request. `number` is the tokenizer's own name for it, unique for the engine's life."""

    number: int
    prompt_ids: bytes
    sampling: Sampling
    cache_salt: str
    generated_ids: bytes = b""
    """int32: what it had generated when the process that ran it died. The answer goes on after these."""
    again: bool = False
    """It was accepted before, so no bound on new requests holds it up."""
    priority: int = 0
    queue_timeout: float | None = None
    waited: float = 0.0
    """Seconds that it waited for its turn with a scheduler that died."""
    siblings: tuple[Sibling, ...] = ()
    """Requests of their own from here on, but the prompt is computed once. None of them tells its log-probabilities."""
    images: tuple[PlacedImage, ...] = ()
    """Of the prompt, in order."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """These requests (int64) are no longer wanted. No answer comes for them, not even to a request unknown by now."""

    numbers: bytes


class Forget(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Requests numbered below `before` are nobody's: their tokenizer died, or submits them again under new numbers.

    Late messages of a dead process may still name them; they are dropped.
    """

    before: int


class Ended(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A request's end, as the scheduler sees it. `stop_id` is the token that ended it (it is also in token_ids)."""

    number: int
    reason: FinishReason
    stop_id: int | None
    usage: Usage


class Started(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a request came to its first token: what the tokenizer needs where it ends a request itself."""

    number: int
    num_cached_tokens: int
    queued_s: float
    prefill_s: float


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """What one step sampled: one token (int32) for each request number (int64), who ended and who began with it."""

    numbers: bytes
    token_ids: bytes
    ended: tuple[Ended, ...]
    started: tuple[Started, ...] = ()
    logs: Logs | None = None
    """Rows are places among `numbers`."""
    prompt_logs: tuple[PromptLogs, ...] = ()
    vectors: tuple[Vector, ...] = ()


class Unservable(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """A submitted request that the scheduler will never run, with the reason."""

    number: int
    code: str
    message: str
    retry_after: float | None = None


class Load(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The scheduler's gauges, sent at most a few times a second and when it becomes idle."""

    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int
    num_steps: int
    num_preemptions: int
    num_prefix_queries: int
    """Prompt tokens looked up in the prefix cache, since start."""
    num_prefix_hits: int
    num_trials: int = 0
    """Steps of a request in which it had tokens to guess; those guessed, and those that were right."""
    num_guesses: int = 0
    num_right_guesses: int = 0
    replica: int = 0
    """Whose they are."""
    num_host_pages: int = 0
    """Places for pages in the host's memory."""
    num_host_hits: int = 0
    """Of the prompt tokens that were cached, those whose pages came from there, or the state behind them."""
    num_stored_bytes: int = 0
    """Copied to there since start, and back."""
    num_loaded_bytes: int = 0


ToTokenizer = Tokens | Unservable | Load


# ---------------------------------------------------------------------------------- scheduler <-> workers


class Enter(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A request takes a slot. After a preemption `token_ids` also holds what was generated before it."""

    slot: int
    token_ids: bytes
    """int32, from position `first` on: nothing looks at those before it, whose keys and values are cached."""
    num_prompt: int
    sampling: Sampling
    first: int = 0
    images: tuple[PlacedImage, ...] = ()
    """Of the prompt, in order."""

    @property
    def num_tokens(self) -> int:
        """With those before `first`."""
        return self.first + len(self.token_ids) // 4


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """What every rank does next: a lease of `count` steps over the same rows (count > 1 only without chunks).

    Applied in this order: slots are left, then entered, pages appended and copied, then rows computed. Rows, in
    the order of their results: `decodes`, then `chunks`. A row samples a token when it is a decode, or a chunk that
    reaches the end of what `Enter` brought.
    """

    step_id: int
    count: int
    leave: bytes
    """int32 slots whose requests are gone."""
    enter: tuple[Enter, ...]
    pages: bytes
    """int32 triples: slot, index in its page table, page. Page 0 is never given out: padding writes there."""
    chunks: bytes
    """int32 triples: slot, first position, length."""
    decodes: bytes
    """int32 slots."""
    epoch: int = 0
    """Grows when workers or the scheduler are replaced: plans and answers of an earlier epoch are dropped."""
    masks: bytes = b""
    """int32 pairs, for rows that sample in slots whose request has a grammar: the slot, and where its mask is in the
    table of masks. Such plans are leases of one step."""
    mask_table: str = ""
    """Its file, where there are any."""
    copies: bytes = b""
    """int32 pairs: page, and page that becomes its copy, before any row is computed."""
    longest: int = 0
    """Tokens of the longest decode row in the first step, the one that it decodes included; one more in each step.
    Where guesses are made, at most: those in flight may all be right, and each step adds as many as it has rows of a
    slot."""
    awaits: bool = False
    """Masks of some rows are still to come: it stops before its draw, and a `Draw` follows. Decodes only."""
    num_guesses: int = 0
    """Each of `decodes` has so many rows more, behind each other: for tokens that may come next, of which those hold
    that are what is sampled. No chunks are beside them, and no masks."""
    kept: bytes = b""
    """int32 pairs, where a model carries states: slot, and place that gets a copy of its state, before all else."""
    restored: bytes = b""
    """int32 pairs: place, and slot that gets a copy of the state kept there, when all of `kept` are copied."""
    swapped: int = 0
    """The last `Swap` that is known to be complete; 0 for none. Each rank begins when it has made those itself."""


class Draw(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Of a plan that awaits masks, the rest; or, ahead of it, some of them."""

    step_id: int
    epoch: int
    masks: bytes
    """Those that came since, as in a `Step`."""
    mask_table: str
    late: bytes
    """int32 rows whose mask did not come in time: they draw nothing, and are planned again."""
    more_come: bool = False


class ReadWeights(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """In its place among the plans, so that all ranks stop at the same one: read other weights from here. No plan comes
    until all workers have said to the supervisor that theirs are read."""

    number: int
    epoch: int
    path: str


class Sampled(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Step `index` (0..count-1) of a lease is complete; int32 token per row, -1 where a row sampled none, -2 where it
    was behind a wrong guess."""

    step_id: int
    index: int
    token_ids: bytes
    epoch: int = 0
    logs: Logs | None = None
    prompt_logs: tuple[PromptLogs, ...] = ()
    vectors: tuple[Vector, ...] = ()


class Computed(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The device has come to the draw of a plan that awaits masks."""

    step_id: int
    epoch: int


ToWorker = Step | Draw | Swap | ReadWeights
ToScheduler = Submit | Abort | Forget | Sampled | Computed | Swapped | Allowed | Disallowed
