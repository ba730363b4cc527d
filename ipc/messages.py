"""Every message of a client to the engine, and the union that the engine decodes; the other way goes `answers.py`.

Messages are MessagePack arrays whose first element names the kind: `["Cancel", "my-request"]`. What a person writes
by hand (`SamplingParams`, `ChatMessage`) is a map, so fields can be left out. Number arrays travel as bytes: int32
little endian for token ids, slots and pages, int64 little endian for the engine's request numbers.

This module knows shapes, not rules: whether a temperature makes sense is decided where the request enters
(`engine/request_check.py`).
"""

from typing import Any, Literal

import msgspec

from tercet.ipc.change_messages import Change
from tercet.ipc.content import Content, images_of, text_of

MAX_LOGPROBS = 20
"""Of the likeliest tokens, so many are told at most."""


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
    content: Content = None
    """None: a turn that only calls tools."""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """Which call this turn, of role `tool`, answers."""
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        """Of its content."""
        return text_of(self.content)

    @property
    def images(self) -> tuple[bytes, ...]:
        """The files in its content."""
        return images_of(self.content)


Ending = Literal["reply", "none", "continued"]
"""Where a prompt ends: as the assistant's next turn begins, behind the last turn, or within that: it is the
assistant's, whose text goes on."""


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a chat template gets besides the messages."""

    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the model may call, in OpenAI's shape."""
    template_kwargs: dict[str, bool | int | str] = {}
    """Such as enable_thinking: what the template itself understands. Only some names are let through."""
    ending: Ending = "reply"


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


MAX_CHAT_MESSAGES = 10_000
"""In one conversation."""
MAX_ANSWERS = 256
"""To one prompt."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to continue one prompt. `None` means: the checkpoint's generation_config, else the neutral value."""

    max_tokens: int | None = None
    """Most tokens to generate; None: the checkpoint's default, else all that context and KV cache have room for."""
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
    stop: str | tuple[str, ...] | None = None
    """Texts that end the answer; (): none, whatever the checkpoint says."""
    stop_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    n: int = 1
    """Answers to the same prompt, which is computed once. Answer i is what seed + i would say alone."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: Structured | None = None
    """Only tokens are sampled that keep the answer in this form."""
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    adapter: str | None = None
    """Name of the adapter that answers; None: the model alone."""
    truncate_prompt_tokens: int | None = None
    """So many tokens are kept of the end of a longer prompt; -1: as many as the context has room for."""


class Handling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the engine treats a request, apart from what it says."""

    received_ids: bytes | tuple[bytes | None, ...] = b""
    """int32: what this client has received of the answer from a tokenizer that died. The answer goes on after it.

    Of n answers, that of each; None: it has ended.
    """
    priority: int = 0
    """Lower goes first, and is interrupted last."""
    queue_timeout: float | None = None
    """Seconds that it may wait before it is begun."""
    timeout: float | None = None
    """Seconds that it may take in all."""
    return_prompt_ids: bool = False
    """`PromptIds` comes ahead of the first token."""


class Generate(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Ask for a continuation of a text."""

    request_id: str
    prompt: str
    params: SamplingParams = SamplingParams()
    cache_salt: str = ""
    """Requests share cached prompt pages only under the same salt."""
    handling: Handling = Handling()
    images: tuple[bytes, ...] = ()
    """Files as in `ImagePart`, for the places that the text keeps for them."""


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


class EmbeddingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is made of a prompt's last hidden state."""

    dimensions: int | None = None
    """Its first so many numbers; None: all."""
    normalize: bool | None = None
    """Whether its length becomes 1, behind the cut; None: as the checkpoint says, else it does."""
    adapter: str | None = None
    """Name of the adapter whose hidden state it is; None: the model's alone."""
    truncate_prompt_tokens: int | None = None
    """A longer prompt is made so many tokens by less of its text's end; -1: as many as the context has room for."""


class ClassificationParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a prompt is classified."""

    adapter: str | None = None
    """Name of the adapter whose hidden state the head gets; None: the model's alone."""
    truncate_prompt_tokens: int | None = None
    """As of embeddings; of a pair the second text is cut."""


_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0, repetition_penalty=1, ignore_eos=True, detokenize=False)


class _OneToken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What runs as a request for one token, which nobody sees."""

    @property
    def params(self) -> SamplingParams:
        return _ONE_TOKEN


class Embed(_OneToken, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Ask for the embedding of a text. Answered with `Embedded` or `Failed`."""

    request_id: str
    prompt: str
    embedding: EmbeddingParams = EmbeddingParams()
    cache_salt: str = ""
    handling: Handling = Handling()


class EmbedIds(_OneToken, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Ask for the embedding of token ids (int32), taken as they are."""

    request_id: str
    prompt_ids: bytes
    embedding: EmbeddingParams = EmbeddingParams()
    cache_salt: str = ""
    handling: Handling = Handling()


class Classify(_OneToken, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Ask what the head that classifies makes of a text. Answered with `Classified` or `Failed`."""

    request_id: str
    prompt: str
    classification: ClassificationParams = ClassificationParams()
    cache_salt: str = ""
    handling: Handling = Handling()
    pair: str | None = None
    """A second text: the prompt is both, as the tokenizer encodes a pair."""


class ClassifyIds(_OneToken, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The same of token ids (int32), taken as they are."""

    request_id: str
    prompt_ids: bytes
    classification: ClassificationParams = ClassificationParams()
    cache_salt: str = ""
    handling: Handling = Handling()


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


Continuation = Generate | GenerateIds | Chat
EmbedRequest = Embed | EmbedIds
ClassifyRequest = Classify | ClassifyIds
Request = Continuation | EmbedRequest | ClassifyRequest
Question = Tokenize | Detokenize
FromClient = Request | Question | Change | Cancel | Hello
