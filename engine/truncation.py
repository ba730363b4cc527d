"""Prompts that are cut to `truncate_prompt_tokens`, where a request asks for that.

What goes on is a prompt's end: the last tokens are kept. What is compared or classified is a text's beginning, whatever
its tokenizer writes around it: the text is cut behind a token, and encoded again. Of a pair it is the second text.
"""

from array import array
from collections.abc import Callable, Sequence

from tercet.engine.refusal import Refusal, invalid
from tercet.engine.request_check import Rules
from tercet.ipc.messages import ClassifyRequest, EmbedRequest, Request

_FIELD = "truncate_prompt_tokens"
_SLACK = 4096
"""Characters around a cut that is made before anything is encoded."""


def check_truncation(request: Request, rules: Rules) -> None:
    """Refuse a size that no prompt may have."""
    wanted, most = _wanted(request), rules.limits.max_model_len - 1
    if wanted is not None and wanted != -1 and not 1 <= wanted <= most:
        raise invalid(_FIELD, wanted, f"1 to {most}, or -1 for all that the context has room for")


def most_tokens(request: Request, rules: Rules) -> int | None:
    """Of the prompt; None: it is not to be cut."""
    wanted = _wanted(request)
    if wanted != -1:
        return wanted
    return max(1, rules.limits.max_model_len - (request.params.max_tokens or 1))


def keeps_end(request: Request) -> bool:
    """Whether it is the prompt's beginning that is cut off."""
    return not isinstance(request, EmbedRequest | ClassifyRequest)


def cut_ids(prompt_ids: Sequence[int], most: int | None, *, keeps_end: bool) -> Sequence[int]:
    """Token ids, taken as they are."""
    if most is None or len(prompt_ids) <= most:
        return prompt_ids
    return prompt_ids[-most:] if keeps_end else prompt_ids[:most]


def readable(text: str, rules: Rules, *, keeps_end: bool) -> str:
    """What can be of use of a text that will be cut: no more than the longest tokens of a whole context have."""
    if rules.longest_token is None:
        return text
    most = rules.longest_token * rules.limits.max_model_len + _SLACK
    return text[-most:] if keeps_end else text[:most]


def shortened(
    text: str, most: int, encode: Callable[[str], "array[int]"], ends: Callable[[str], Sequence[int]]
) -> "array[int]":
    """`encode` of as much of the text's beginning as leaves at most so many tokens. `ends`: where the tokens of a text
    by itself end in it."""
    prompt_ids = encode(text)
    while (excess := len(prompt_ids) - most) > 0:
        if not text:
            told = f"{len(prompt_ids)} tokens around the text"
            raise Refusal("invalid_request", f"{_FIELD} is {most}, and there are {told}; want more")
        kept = [0, *ends(text)][:-excess]
        text = text[: min(kept[-1], len(text) - 1)] if kept else ""
        prompt_ids = encode(text)
    return prompt_ids


def _wanted(request: Request) -> int | None:
    if isinstance(request, EmbedRequest):
        return request.embedding.truncate_prompt_tokens
    if isinstance(request, ClassifyRequest):
        return request.classification.truncate_prompt_tokens
    return request.params.truncate_prompt_tokens
