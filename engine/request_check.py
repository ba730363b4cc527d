"""Every rule a request must satisfy, in one place: what a client asks becomes a `Submit`, or is refused with reasons.

Pure. A parameter is honoured or refused, never accepted and ignored. A refusal names the field, what came, and what is
wanted; past this door every id, size and number is in range.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

from msgspec import structs

from tercet.engine.generation_defaults import GenerationDefaults
from tercet.engine.id_range import all_below
from tercet.engine.logits_check import adjustments_of, check_adjustments
from tercet.engine.page_need import longest_request
from tercet.engine.pooling import Pooling
from tercet.engine.refusal import Refusal, check_range, invalid, short
from tercet.engine.structured_check import check_structured, write_grammar
from tercet.ipc.messages import MAX_ANSWERS, MAX_LOGPROBS, Request, SamplingParams
from tercet.ipc.process_messages import Limits, LoadedAdapter
from tercet.ipc.room import context_length, too_many_tokens
from tercet.ipc.step_messages import Sampling

MAX_STOP_IDS = 8
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_NAME_LENGTH = 256
_MAX_PRIORITY = 2**31 - 1
_MAX_SECONDS = 10_000_000
_MAX_TEMPERATURE = 1000
_LEAST_TEMPERATURE = 1e-6
"""With less the likeliest token is as good as certain, and logits may be too large to be divided by it."""


_T = TypeVar("_T")


@dataclass(frozen=True)
class Rules:
    """What requests are measured against."""

    limits: Limits
    defaults: GenerationDefaults
    eos_ids: tuple[int, ...]
    seed: int
    """Of the engine: it gives seeds to requests that bring none."""
    longest_token: int | None
    """No token covers more bytes of text; None: not known."""
    takes_text: bool
    """The checkpoint has a tokenizer."""
    page_size: int
    pooling: Pooling
    """How an embedding is made."""
    adapters: Mapping[str, LoadedAdapter]
    """That requests may name."""


def stop_strings(params: SamplingParams, default: str | tuple[str, ...] | None = None) -> tuple[str, ...]:
    """`stop` may be one string or several; where it says nothing, the checkpoint's `default` counts as its
    end-of-sequence ids do, wherever there is a text to be looked at."""
    stop = params.stop
    if stop is None:
        stop = () if default is None or params.ignore_eos or not params.detokenize else default
    return (stop,) if isinstance(stop, str) else stop


def check_params(params: SamplingParams, rules: Rules) -> None:
    """Refuse what is wrong or not supported whatever the prompt is."""
    _refuse_unsupported(params)
    if params.temperature is not None:
        check_range("temperature", params.temperature, 0, _MAX_TEMPERATURE)
    if params.top_p is not None and not 0 < params.top_p <= 1:
        raise invalid("top_p", params.top_p, "more than 0 and at most 1")
    if params.top_k is not None and params.top_k < -1:
        raise invalid("top_k", params.top_k, "1 or more, or 0 or -1 for all tokens")
    if params.min_p is not None:
        check_range("min_p", params.min_p, 0, 1)
    if params.seed is not None:
        check_range("seed", params.seed, 0, 2**63 - 1)
    if params.max_tokens is not None and params.max_tokens < 1:
        raise invalid("max_tokens", params.max_tokens, "at least 1")
    if params.min_tokens < 0:
        raise invalid("min_tokens", params.min_tokens, "at least 0")
    if not 1 <= params.n <= MAX_ANSWERS:
        raise invalid("n", params.n, f"1 to {MAX_ANSWERS}")
    check_adjustments(params, rules.limits.vocab_size)
    for field, wanted in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if wanted is not None:
            check_range(field, wanted, 0, MAX_LOGPROBS)
    check_structured(params, takes_text=rules.takes_text, has_eos=bool(rules.eos_ids))
    adapter_named(params.adapter, rules)
    _check_stops(params, rules)


def adapter_named(name: str | None, rules: Rules) -> tuple[int, int]:
    """Its place and its load, as `Sampling` has them. Refuses a name that no adapter has."""
    if name is None:
        return -1, -1
    if name not in rules.adapters:
        known = ", ".join(map(repr, rules.adapters))
        wanted = f"one of {known}, or nothing" if known else "nothing: the engine has no adapters"
        raise invalid("adapter", repr(name), wanted)
    return rules.adapters[name].place, rules.adapters[name].load


def check_text_length(text: str, rules: Rules) -> None:
    """Refuse, before any work is done on it, a text that cannot fit the context whatever its tokens are."""
    if rules.longest_token is None:
        return
    at_least = len(text.encode()) // rules.longest_token
    if at_least >= rules.limits.max_model_len:
        raise _too_long(f"at least {at_least} tokens", rules)


def check_prompt_ids(prompt_ids: Sequence[int], rules: Rules, field: str = "prompt") -> None:
    """Refuse a prompt that is empty, too long, or names tokens that the model does not have."""
    if not prompt_ids:
        raise invalid(field, "no tokens", "at least 1 token")
    check_length(len(prompt_ids), 0, rules)
    _check_ids(prompt_ids, rules, field)


def check_length(num_tokens: int, num_of_images: int, rules: Rules) -> None:
    """Refuse a prompt that the context has no room for."""
    if num_tokens >= rules.limits.max_model_len:
        of_images = f", {num_of_images} of them of images" if num_of_images else ""
        raise _too_long(f"{num_tokens} tokens{of_images}", rules)


def _check_ids(token_ids: Sequence[int], rules: Rules, field: str) -> None:
    limit = rules.limits.vocab_size
    if not all_below(token_ids, limit):
        bad = next(token_id for token_id in token_ids if not 0 <= token_id < limit)
        raise invalid(field, f"token id {bad}", f"ids from 0 to {limit - 1}")


def check_handling(request: Request) -> None:
    """Refuse a salt of unreasonable length, and times and priorities that are none."""
    if len(request.cache_salt) > MAX_NAME_LENGTH:
        raise invalid("cache_salt", f"{len(request.cache_salt)} characters", f"at most {MAX_NAME_LENGTH}")
    handling = request.handling
    check_range("priority", handling.priority, -_MAX_PRIORITY, _MAX_PRIORITY)
    for field, seconds in (("queue_timeout", handling.queue_timeout), ("timeout", handling.timeout)):
        if seconds is not None and not 0 < seconds <= _MAX_SECONDS:
            raise invalid(field, seconds, f"more than 0 and at most {_MAX_SECONDS} seconds")


def received_of(request: Request) -> dict[int, bytes]:
    """What a client has received, by index of each answer that has not ended."""
    received, n = request.handling.received_ids, request.params.n
    each = [received] * (n if not received else 1) if isinstance(received, bytes) else list(received)
    if len(each) != n:
        raise invalid("received_ids", f"those of {len(each)} answers", f"as many as n, {n}")
    live = {index: ids for index, ids in enumerate(each) if ids is not None}
    if not live:
        raise invalid("received_ids", "nil for every answer", "the ids of one that has not ended")
    return live


def goes_on(received: Mapping[int, bytes], n: int) -> bool:
    """Whether its client has received some of it: it was taken once, and is not refused because there are too many."""
    return any(received.values()) or len(received) < n


def check_received_ids(received_ids: Sequence[int], max_tokens: int, rules: Rules) -> None:
    """Refuse what cannot be the beginning of an answer of at most `max_tokens`."""
    if not received_ids:
        return
    if len(received_ids) >= max_tokens:
        raise invalid("received_ids", f"{len(received_ids)} tokens", f"fewer than max_tokens ({max_tokens})")
    _check_ids(received_ids, rules, "received_ids")


def unpack_ids(packed: bytes, field: str = "prompt_ids") -> "array[int]":
    """Token ids as they come over the wire."""
    if len(packed) % 4:
        raise invalid(field, f"{len(packed)} bytes", "4 bytes (int32, little endian) for each token")
    return array("i", packed)


def resolve(params: SamplingParams, num_prompt: int, number: int, rules: Rules) -> Sampling:
    """Every default filled in, for checked parameters and a prompt of `num_prompt` tokens."""
    defaults = rules.defaults
    room = rules.limits.max_model_len - num_prompt
    max_tokens = params.max_tokens
    if max_tokens is None:
        max_tokens = max(1, min(room, longest_request(rules.limits, rules.page_size) - num_prompt))
        if defaults.max_new_tokens is not None:
            max_tokens = min(max_tokens, defaults.max_new_tokens)
    if max_tokens > room:
        raise Refusal("too_long_for_context", too_many_tokens(max_tokens, num_prompt, rules.limits.max_model_len))
    if params.min_tokens > max_tokens:
        raise invalid("min_tokens", params.min_tokens, f"at most max_tokens ({max_tokens})")
    temperature = _first(params.temperature, defaults.temperature, 1.0)
    top_k = _first(params.top_k, defaults.top_k, 0)
    place, load = adapter_named(params.adapter, rules)
    return Sampling(
        temperature=temperature if temperature >= _LEAST_TEMPERATURE else 0.0,
        top_k=top_k if 0 < top_k < rules.limits.vocab_size else 0,
        top_p=_first(params.top_p, defaults.top_p, 1.0),
        min_p=_first(params.min_p, defaults.min_p, 0.0),
        seed=_drawn_seed(rules.seed, number) if params.seed is None else params.seed,
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        stop_ids=array("i", _stop_ids(params, rules)).tobytes(),
        adjustments=adjustments_of(params, defaults.repetition_penalty),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        grammar=None if params.structured is None else write_grammar(params.structured),
        open_ended=params.max_tokens is None,
        adapter=place,
        adapter_load=load,
    )


def sampling_of(sampling: Sampling, index: int) -> Sampling:
    """Of one answer to a prompt among several. The first tells of the prompt."""
    if index == 0:
        return sampling
    return structs.replace(sampling, seed=(sampling.seed + index) % 2**63, prompt_logprobs=None)


def check_defaults(rules: Rules) -> None:
    """The checkpoint's own defaults obey the same rules: better found at start than in each request."""
    d = rules.defaults
    sampled = {"temperature": d.temperature, "top_p": d.top_p, "top_k": d.top_k, "min_p": d.min_p}
    check_params(SamplingParams(**sampled, repetition_penalty=d.repetition_penalty, stop=d.stop_strings), rules)  # type: ignore[arg-type]
    if d.max_new_tokens is not None and d.max_new_tokens < 1:
        raise invalid("max_new_tokens", d.max_new_tokens, "at least 1")


def _stop_ids(params: SamplingParams, rules: Rules) -> list[int]:
    eos_ids = () if params.ignore_eos else rules.eos_ids
    return list(dict.fromkeys((*eos_ids, *(params.stop_token_ids or ()))))


def _check_stops(params: SamplingParams, rules: Rules) -> None:
    strings = stop_strings(params)
    if len(strings) > MAX_STOP_STRINGS:
        raise invalid("stop", f"{len(strings)} strings", f"at most {MAX_STOP_STRINGS}")
    for text in strings:
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise invalid("stop", f"a string of {len(text)} characters", f"1 to {MAX_STOP_LENGTH}")
    if strings and not params.detokenize:
        raise invalid("stop", "a string", "stop_token_ids beside detokenize false: stop strings are looked for in text")
    if strings and not rules.takes_text:
        raise invalid("stop", "a string", "stop_token_ids: this checkpoint has no tokenizer")
    stop_ids = params.stop_token_ids or ()
    if len(stop_ids) > MAX_STOP_IDS:  # looking through millions would hold everybody up
        raise invalid("stop_token_ids", f"{len(stop_ids)} ids", f"at most {MAX_STOP_IDS}")
    for token_id in stop_ids:
        if not 0 <= token_id < rules.limits.vocab_size:
            raise invalid("stop_token_ids", token_id, f"ids from 0 to {rules.limits.vocab_size - 1}")
    num_stops = len(_stop_ids(params, rules))
    if num_stops > MAX_STOP_IDS:
        raise invalid(
            "stop_token_ids",
            f"{num_stops} ids together with the checkpoint's {len(rules.eos_ids)} end-of-sequence ids",
            f"at most {MAX_STOP_IDS}",
        )


def _refuse_unsupported(params: SamplingParams) -> None:
    neutral: dict[str, tuple[object, ...]] = {
        "spaces_between_special_tokens": (True,),
    }
    for field, allowed in neutral.items():
        value = getattr(params, field)
        if value not in allowed:
            raise Refusal(
                "not_supported",
                f"{field} is {short(value)}, which is not supported yet; want {allowed[-1]!r} or nothing",
            )


def _drawn_seed(engine_seed: int, number: int) -> int:
    """The seed of a request that brings none: a new one for each, and the same again in the next run."""
    digest = blake2b(b"%d:%d" % (engine_seed, number), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _first(value: _T | None, default: _T | None, neutral: _T) -> _T:
    if value is not None:
        return value
    return neutral if default is None else default


def _too_long(length_told: str, rules: Rules) -> Refusal:
    length = rules.limits.max_model_len
    return Refusal(
        "prompt_too_long",
        f"the prompt has {length_told}, and {context_length(length)}, answer included; want at most {length - 1}",
    )
