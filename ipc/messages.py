"""Every message that crosses a process boundary, and the union each receiver decodes.

Messages are MessagePack arrays whose first element names the kind: `["Cancel", "my-request"]`. What a person writes
by hand (`SamplingParams`, `ChatMessage`) is a map, so fields can be left out. Number arrays travel as bytes: int32
little endian for token ids, slots and pages, int64 little endian for the engine's request numbers.

This module knows shapes, not rules: whether a temperature makes sense is decided where the request enters
(`engine/request_check.py`).
"""

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "cancelled"]
ToolFormat = Literal["none", "hermes", "llama3", "mistral"]
ReasoningFormat = Literal["none", "think", "think_opened"]
"""think: between <think> and </think>; think_opened: the same, and the prompt has opened it already."""


class FunctionCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a model wants called."""

    name: str
    arguments: dict[str, Any]


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call of an assistant's turn."""

    id: str = ""
    function: FunctionCall


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn of a conversation, as the checkpoint's chat template gets it."""

    role: str
    content: str | None = None
    """None: a turn that only calls tools."""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """Which call this turn, of role `tool`, answers."""
    reasoning_content: str | None = None


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a chat template gets besides the messages."""

    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the model may call, in OpenAI's shape."""
    template_kwargs: dict[str, bool | int | str] = {}
    """Such as enable_thinking: what the template itself understands. Only some names are let through."""


class Structured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What form an answer must have: one of these."""

    json_schema: dict[str, Any] | str | None = None
    """A JSON schema, as an object or as its text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A context-free grammar in Lark's notation, whose first rule is `start`."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to continue one prompt. `None` means: the checkpoint's generation_config, else the neutral value."""

    max_tokens: int | None = None
    """Most tokens to generate; None: up to the context limit."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens are not sampled before this many."""
    temperature: float | None = None
    """0 takes the likeliest token."""
    top_p: float | None = None
    top_k: int | None = None
    """0 or -1: all tokens."""
    min_p: float | None = None
    seed: int | None = None
    """None draws a seed; the same seed gives the same text, whatever else the engine does."""
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: Structured | None = None
    """Only tokens are sampled that keep the answer in this form."""
    spaces_between_special_tokens: bool = True
    detokenize: bool = True


class Handling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the engine treats a request, apart from what it says."""

    received_ids: bytes = b""
    """int32: what this client has received of the answer from a tokenizer that died. The answer goes on after it."""
    priority: int = 0
    """Lower goes first, and is interrupted last."""
    queue_timeout: float | None = None
    """Seconds that it may wait before it is begun."""
    timeout: float | None = None
    """Seconds that it may take in all."""


# ---------------------------------------------------------------------------------- client <-> tokenizer


class Generate(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Ask for a continuation of a text."""

    request_id: str
    prompt: str
    params: SamplingParams = SamplingParams()
    cache_salt: str = ""
    """Requests share cached prompt pages only under the same salt."""
    handling: Handling = Handling()


class GenerateIds(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Ask for a continuation of token ids (int32), taken as they are."""

    request_id: str
    prompt_ids: bytes
    params: SamplingParams = SamplingParams()
    cache_salt: str = ""
    handling: Handling = Handling()


class Chat(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Ask for the next turn of a conversation; the checkpoint's chat template makes the prompt."""

    request_id: str
    messages: tuple[ChatMessage, ...]
    params: SamplingParams = SamplingParams()
    cache_salt: str = ""
    handling: Handling = Handling()
    options: ChatOptions = ChatOptions()


class Tokenize(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Ask what the prompt of a request would be; nothing is generated. Answered with `Tokenized` or `Failed`."""

    request_id: str
    request: Generate | Chat
    """Its own name, parameters and salt do not matter."""


class Detokenize(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Ask for the text of token ids (int32), special tokens included. Answered with `Detokenized` or `Failed`."""

    request_id: str
    token_ids: bytes


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Stop a request of this connection. Its terminal message is `Finished` with reason `cancelled`."""

    request_id: str


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Ask who is there; answered with `EngineInfo`. Doubles as a ping."""


class Usage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one finished request consumed, and where its time went."""

    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    queued_s: float
    prefill_s: float
    decode_s: float


class Delta(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """New text of a running request. All deltas in order, concatenated, are the final text."""

    request_id: str
    text: str
    token_ids: bytes


class Finished(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The one good end of a request. `text` and `token_ids` are what no earlier `Delta` carried."""

    request_id: str
    text: str
    token_ids: bytes
    reason: FinishReason
    stop: str | int | None
    """The stop string or token id that ended it, if one did."""
    usage: Usage


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The one bad end of a request: refused, or failed on the way."""

    request_id: str
    code: str
    message: str
    retry_after: float | None = None
    """Seconds after which it is worth asking again, where that is known."""


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """A message that never became a request: not decodable, of an unknown kind, or a request id that is in use.

    A live request of the same id goes on undisturbed.
    """

    request_id: str | None
    code: str
    message: str


class EngineInfo(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """What a client may want to know before it asks."""

    model: str
    version: str
    max_model_len: int
    vocab_size: int
    num_running: int
    num_waiting: int
    num_free_pages: int
    """Pages of the KV cache that a new request could have; those that only the prefix cache remembers count."""
    num_pages: int
    num_steps: int
    num_preemptions: int
    num_prefix_queries: int
    """Prompt tokens looked up in the prefix cache."""
    num_prefix_hits: int
    tool_format: ToolFormat = "none"
    """How the model writes tool calls, as its chat template shows."""
    reasoning_format: ReasoningFormat = "none"


class Tokenized(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The answer to `Tokenize`."""

    request_id: str
    token_ids: bytes


class Detokenized(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The answer to `Detokenize`."""

    request_id: str
    text: str


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How likely the model itself found a token, before any parameter had its say."""

    token_id: int
    logprob: float
    rank: int
    """1: no token was likelier."""
    token: bytes
    """What it adds to the text: UTF-8, or a part of a character."""

    @property
    def text(self) -> str:
        """The token as far as it is text."""
        return self.token.decode(errors="replace")


class Logprobs(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Of each token of the `Delta` or `Finished` that follows: itself, then the likeliest tokens in its place."""

    request_id: str
    tokens: tuple[tuple[TokenLogprob, ...], ...]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The same of tokens of the prompt, from `position` on. The first token, at position 0, has none."""

    request_id: str
    position: int
    tokens: tuple[tuple[TokenLogprob, ...], ...]


class Batch(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Everything one step has for one client, in order."""

    items: tuple[Delta | Finished | Failed | Logprobs | PromptLogprobs, ...]


Request = Generate | GenerateIds | Chat
Question = Tokenize | Detokenize
FromClient = Request | Question | Cancel | Hello
ToClient = Batch | Failed | Rejected | EngineInfo | Tokenized | Detokenized


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


class Logs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Log-probabilities of some rows: int32 words of each, bits of floats among them (see `engine/logprobs.py`)."""

    rows: bytes
    """int32: of which rows, or which places among numbers."""
    num_top: int
    words: bytes


class PromptLogs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The same of consecutive tokens of a prompt."""

    row: int
    """From workers, the row of the step; from the scheduler, the request's number."""
    position: int
    num_top: int
    words: bytes


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """What one step sampled: one token (int32) for each request number (int64), who ended and who began with it."""

    numbers: bytes
    token_ids: bytes
    ended: tuple[Ended, ...]
    started: tuple[Started, ...] = ()
    logs: Logs | None = None
    """Rows are places among `numbers`."""
    prompt_logs: tuple[PromptLogs, ...] = ()


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


ToTokenizer = Tokens | Unservable | Load


# ---------------------------------------------------------------------------------- scheduler <-> workers


class Enter(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A request takes a slot. After a preemption `token_ids` also holds what was generated before it."""

    slot: int
    token_ids: bytes
    num_prompt: int
    sampling: Sampling


class Mask(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which tokens a slot may sample next: int32 words, a bit for each token id."""

    slot: int
    words: bytes


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """What every rank does next: a lease of `count` steps over the same rows (count > 1 only without chunks).

    Applied in the order of the fields: slots are left, then entered, pages appended, then rows computed. Rows, in
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
    masks: tuple[Mask, ...] = ()
    """For every row that samples in a slot whose request has a grammar; such plans are leases of one step."""


class Sampled(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Step `index` (0..count-1) of a lease is complete; int32 token per row, -1 where a row sampled none."""

    step_id: int
    index: int
    token_ids: bytes
    epoch: int = 0
    """Of the plan."""
    logs: Logs | None = None
    prompt_logs: tuple[PromptLogs, ...] = ()


ToWorker = Step
ToScheduler = Submit | Abort | Forget | Sampled


# ----------------------------------------------------------------------- supervisor <-> children (pipes)


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the workers found out about model and memory; the tokenizer and the scheduler begin with it."""

    num_pages: int
    """Pages in each rank's cache, page 0 (padding) included."""
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str


class Begin(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """All workers are loaded: serve."""

    limits: Limits


class Drain(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Take no new requests; exit once the running ones have ended."""


class Abandon(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The engine cannot go on: fail every live request with this message and exit."""

    message: str
    code: str = "engine_died"


class WorkersRestarted(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To the scheduler: all workers are new and empty. What ran is to run again, under plans of this epoch."""

    epoch: int
    limits: Limits
    blame: str | None
    """How the old ones died, if what they computed may be to blame; None: somebody killed them."""


class SchedulerRestarted(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To the tokenizer: the scheduler is new and knows no request."""


class Impaired(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To the HTTP door: these kinds of process are being replaced; with none, the engine is whole."""

    roles: tuple[str, ...]


class Phase(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Start-up progress of one child: `done` of `total` units of `what`."""

    what: str
    done: int
    total: int


class Loaded(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A worker could run a step; the tokenizer and the scheduler wait for `Begin`."""

    limits: Limits | None = None


class Serving(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """This child got `Begin` and does its work."""


class Beat(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The child's own loop is alive. A worker beats from its step loop, so that a hang is seen."""

    count: int


class LastWords(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Why this child is about to exit."""

    message: str


ToChild = Begin | Drain | Abandon | WorkersRestarted | SchedulerRestarted | Impaired
FromChild = Phase | Loaded | Serving | Beat | LastWords


# --------------------------------------------------------------------- supervisor -> its owner (a pipe)


class Progress(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A child's `Phase`, and whose it is."""

    process: str
    what: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A request would be served now."""

    listen: tuple[str, ...]
    model: str
    seconds: float
    limits: Limits


FromSupervisor = Progress | Ready | LastWords
