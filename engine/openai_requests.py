"""What OpenAI's clients send, and what it means in the engine's own words.

Every field is here or refused; a field whose effect the engine does not have takes its neutral value only. Whether a
number makes sense is decided by the engine. Beyond OpenAI's fields there are the engine's own sampling parameters,
which clients send as `extra_body`.
"""

from typing import Annotated, Any, Literal

import msgspec

from tercet.engine.http_errors import ApiError
from tercet.engine.openai_messages import Int, Message, NamedTool, Tool, chat_options, ending_of, to_engine
from tercet.engine.openai_prompts import read_prompts
from tercet.engine.openai_structured import ResponseFormat, StructuredOutputs
from tercet.ipc.messages import ChatMessage, ChatOptions, SamplingParams


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`include_usage`: one more chunk at the end says what was consumed."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Each chunk says what has been consumed so far."""
    include_obfuscation: Literal[False] | None = None


UsageWanted = Literal["never", "at_end", "always"]
_Note = Annotated[str, msgspec.Meta(max_length=512)]
"""For the log of requests."""
_Key = Annotated[str, msgspec.Meta(max_length=64)]


class Sampled(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: _Note | None = None
    safety_identifier: _Note | None = None
    metadata: Annotated[dict[_Key, _Note], msgspec.Meta(max_length=16)] | None = None
    prompt_cache_key: str | None = None
    """Nothing is left to do for it: whatever prompts begin alike share what is cached."""
    max_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Int | None = None
    stop: str | list[str] | None = None
    seed: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    priority: Int | None = None
    queue_timeout: float | None = None
    """Seconds that the request may wait for its turn."""
    timeout: float | None = None
    """Seconds that it may take in all."""
    return_token_ids: bool | None = None
    prompt_logprobs: Int | None = None
    """As vLLM has it: of the prompt's tokens, with so many of the likeliest."""
    truncate_prompt_tokens: Int | None = None
    """As vLLM has it: so many of a longer prompt's last tokens are kept."""

    @property
    def names(self) -> dict[str, str]:
        """What this request calls the fields for which the engine has other names."""
        return {"prompt": "prompt", "structured": "structured_outputs"}

    @property
    def wants_usage(self) -> UsageWanted:
        options = self.stream_options
        if options is None or not options.include_usage:
            return "never"
        return "always" if options.continuous_usage_stats else "at_end"

    def check(self) -> None:
        """What only makes sense together."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options came without stream; want both or neither", param="stream_options")
        if self.stream_options and self.stream_options.continuous_usage_stats and self.wants_usage == "never":
            raise ApiError(
                400, "continuous_usage_stats came without include_usage; want both or neither", param="stream_options"
            )
        check_seconds(self.timeout)
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs came with stream; want one of them", param="prompt_logprobs")

    def _params(self, **more: Any) -> SamplingParams:
        given: dict[str, Any] = {}
        for field in SamplingParams.__struct_fields__:
            if field == "n":  # each answer is a request of its own
                continue
            value = more.get(field, getattr(self, field, None))
            if value is not None:
                given[field] = tuple(value) if isinstance(value, list) else value
        if self.logit_bias is not None:
            given["logit_bias"] = _ids_to_bias(self.logit_bias)
        if self.structured_outputs is not None:
            given["structured"] = self.structured_outputs.to_engine()
        return SamplingParams(**given)


class ChatCompletionRequest(Sampled, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: Int | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, bool | Int | str] | None = None
    """Of those names only that the engine lets through to the template."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """One of them by itself."""
    add_generation_prompt: bool | None = None
    """False: the prompt ends behind the last turn, and no turn of the assistant's has begun."""
    continue_final_message: bool | None = None
    """The last turn is the assistant's, and its text goes on."""
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None
    functions: None = None
    function_call: None = None
    audio: None = None
    prediction: None = None

    @property
    def names(self) -> dict[str, str]:
        forms = () if self.must_call else ("response_format", "structured_outputs")
        given = [name for name in forms if getattr(self, name) is not None]
        names = {"prompt": "messages", "structured": (given or ["tools"])[0], "logprobs": "top_logprobs"}
        return names if self.max_completion_tokens is None else {**names, "max_tokens": "max_completion_tokens"}

    @property
    def must_call(self) -> bool:
        """Whether the answer is a call, whatever other form is asked for."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def uses_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    def to_prompt(self) -> list[ChatMessage]:
        return to_engine(self.messages)

    def to_options(self) -> ChatOptions:
        kwargs, effort = self.chat_template_kwargs or {}, self.reasoning_effort
        if effort is not None and kwargs.get("reasoning_effort", effort) != effort:
            raise ApiError(
                400,
                f"reasoning_effort is {effort}, and another one in chat_template_kwargs; want one of them",
                param="reasoning_effort",
            )
        if effort is not None:
            kwargs = {**kwargs, "reasoning_effort": effort}
        ending = ending_of(self.add_generation_prompt, self.continue_final_message)
        return chat_options(self.tools if self.uses_tools else None, kwargs, ending)

    def to_params(self) -> SamplingParams:
        if (self.must_call and not self.tools) or (self.tool_choice == "auto" and self.tools is None):
            raise ApiError(400, "tool_choice came without tools; want both or neither", param="tool_choice")
        if self.parallel_tool_calls is not None and self.tools is None:
            raise ApiError(
                400, "parallel_tool_calls came without tools; want both or neither", param="parallel_tool_calls"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs came without logprobs; want logprobs true as well", param="top_logprobs")
        limit = self.max_completion_tokens
        if limit is not None and self.max_tokens is not None and limit != self.max_tokens:
            raise ApiError(
                400,
                f"max_completion_tokens is {limit} and max_tokens {self.max_tokens}; want one of them",
                param="max_completion_tokens",
            )
        if self.response_format is not None and self.structured_outputs is not None:
            raise ApiError(
                400, "response_format and structured_outputs came; want one of them", param="response_format"
            )
        return self._params(
            structured=None if self.response_format is None else self.response_format.to_engine(),
            max_tokens=self.max_tokens if limit is None else limit,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class CompletionRequest(Sampled, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/completions."""

    prompt: str | list[Any]
    """A text, several texts, token ids, or several lists of token ids."""
    max_tokens: Int | None = 16
    logprobs: Int | None = None
    echo: bool | None = None
    """The prompt comes back before the answer; `max_tokens` may be 0 then."""
    suffix: None = None
    best_of: Literal[1] | None = None

    def to_prompts(self) -> list[str | list[int]]:
        """One or more prompts; their answers come in this order."""
        return read_prompts("prompt", self.prompt, _MAX_PROMPTS)

    def check(self) -> None:
        super().check()
        if self.echo and self.stream:
            raise ApiError(400, "echo came with stream; want one of them", param="echo")
        if self.echo and self.truncate_prompt_tokens is not None:
            raise ApiError(400, "echo came with truncate_prompt_tokens; want one of them", param="echo")

    @property
    def wants_prompt_only(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    def to_params(self) -> SamplingParams:
        more: dict[str, Any] = {"max_tokens": 1} if self.wants_prompt_only else {}
        if self.echo and self.logprobs is not None:
            more["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return self._params(**more)


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /tokenize: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=128)] | None = None
    chat_template_kwargs: dict[str, bool | Int | str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def to_options(self) -> ChatOptions | None:
        if self.messages is None:
            for name in ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
                if getattr(self, name):
                    raise ApiError(400, f"{name} came without messages; want both or neither", param=name)
            return None
        ending = ending_of(self.add_generation_prompt, self.continue_final_message)
        return chat_options(self.tools, self.chat_template_kwargs, ending)

    def to_prompt(self) -> str | list[ChatMessage]:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "prompt and messages: want one of them", param="prompt")
        if self.messages is None:
            assert self.prompt is not None
            return self.prompt
        if not self.messages:
            raise ApiError(400, "messages is empty; want at least 1", param="messages")
        return to_engine(self.messages)


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /detokenize."""

    tokens: list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]]
    model: str | None = None


MOST_SECONDS = 10_000_000
"""As of the engine's own times."""
_MAX_PROMPTS = 256
"""In one request for completions."""


def check_seconds(timeout: float | None) -> None:
    """That a request may take in all."""
    if timeout is not None and not 0 < timeout <= MOST_SECONDS:
        text = f"timeout is {timeout}; want more than 0 and at most {MOST_SECONDS} seconds"
        raise ApiError(400, text, param="timeout")


def _ids_to_bias(bias: dict[str, float]) -> dict[int, float]:
    """JSON's keys are strings."""
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise ApiError(400, f"logit_bias has key {key[:50]!r}; want token ids", param="logit_bias")
    return {int(key): value for key, value in bias.items()}
