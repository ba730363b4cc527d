"""Every message of the engine to a client, and the union that the client decodes.

MessagePack arrays as in `messages.py`, whose other half this is.
"""

from typing import Literal

import msgspec

from tercet.ipc.change_messages import Changed

FinishReason = Literal["stop", "length", "cancelled"]
ToolFormat = Literal[
    "none",
    "hermes",
    "qwen3_coder",
    "glm",
    "minimax",
    "llama3",
    "mistral",
    "mistral_named",
    "deepseek",
    "deepseek_fenced",
    "kimi",
    "gemma",
    "harmony",
]
"""mistral: a list of calls. mistral_named: a name and its arguments for each. deepseek_fenced: as deepseek, with the
arguments in a fence, as code stands in one. harmony: messages to functions."""
ReasoningFormat = Literal[
    "none",
    "think",
    "think_opened",
    "think_by_default",
    "think_on_request",
    "bracketed",
    "bracketed_opened",
    "channel",
    "channel_opened",
    "harmony",
]
"""think: between <think> and </think>. The next three: the same, and the prompt has opened it already; always, unless
the template is told not to think, or if it is told to. bracketed: between [THINK] and [/THINK], or that and opened.
channel: between <|channel>thought and <channel|>, or that and opened. harmony: in messages of their own. The marks of
these three are shown only by skip_special_tokens false."""


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
    seed: int | None = None
    """In the first of each answer, if the request samples and brought none: the one it was given."""
    index: int = 0
    """Which of n answers."""


class Finished(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The one good end of an answer. `text` and `token_ids` are what no earlier `Delta` carried.

    A request with n answers ends when all of them have.
    """

    request_id: str
    text: str
    token_ids: bytes
    reason: FinishReason
    stop: str | int | None
    """The stop string or token id that ended it, if one did."""
    usage: Usage
    index: int = 0


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The one bad end of a request, all its answers included: refused, or failed on the way."""

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


Activation = Literal["softmax", "sigmoid", "none"]


class Classifier(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a model's head tells apart, if it has one that classifies."""

    labels: tuple[str, ...]
    """One for each logit."""
    activation: Activation
    """What makes of logits what the model was trained to say."""


class Gauges(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One of several replicas, in the terms of `EngineInfo`."""

    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int
    num_steps: int
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_trials: int = 0
    num_guesses: int = 0
    num_right_guesses: int = 0
    num_host_pages: int = 0
    num_host_hits: int = 0
    num_stored_bytes: int = 0
    num_loaded_bytes: int = 0


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
    eos_ids: tuple[int, ...] = ()
    """Tokens with which the model ends a text."""
    num_trials: int = 0
    """Steps of a request in which it had tokens to guess."""
    num_guesses: int = 0
    num_right_guesses: int = 0
    adapters: tuple[str, ...] = ()
    """Names of those that a request may ask for."""
    classifier: Classifier | None = None
    """None: the model has no head that classifies."""
    replicas: tuple[Gauges, ...] = ()
    """Of several replicas each one's; the other numbers are theirs together. Of one, none."""
    num_host_pages: int = 0
    """Pages for which there is room in the host's memory."""
    num_host_hits: int = 0
    """Of `num_prefix_hits`, the tokens whose pages came from there."""
    num_stored_bytes: int = 0
    """Bytes of pages that were copied to there, and back."""
    num_loaded_bytes: int = 0
    weights: str = ""
    """Which ones: the model as it was given at the start, or for the last change."""
    is_asleep: bool = False
    """There are no workers, and requests are refused."""


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
    index: int = 0


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The same of tokens of the prompt, from `position` on. The first token, at position 0, has none."""

    request_id: str
    position: int
    tokens: tuple[tuple[TokenLogprob, ...], ...]


class PromptIds(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Which token ids (int32) the prompt of a request has that asked for them: once, before any token of an answer."""

    request_id: str
    token_ids: bytes


class Embedded(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The answer to `Embed`, and its end."""

    request_id: str
    values: bytes
    """fp32."""
    usage: Usage


class Classified(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The answer to `Classify`, and its end."""

    request_id: str
    logits: bytes
    """fp32, one for each label."""
    usage: Usage


News = Delta | Finished | Logprobs | PromptLogprobs | PromptIds | Embedded | Classified
"""What a request may still be told, or how it ends well."""
Item = News | Failed


class Batch(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Everything one step has for one client, in order."""

    items: tuple[Item, ...]


ToClient = Batch | Failed | Rejected | EngineInfo | Tokenized | Detokenized | Changed
