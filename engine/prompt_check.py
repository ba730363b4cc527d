"""What is wrong with a prompt before anybody has made token ids of it."""

from tercet.engine.nesting import MAX_LEVELS, is_nested_deeper
from tercet.engine.refusal import Refusal, invalid, short
from tercet.engine.request_check import Rules, check_text_length
from tercet.engine.truncation import most_tokens
from tercet.ipc.messages import MAX_CHAT_MESSAGES, Chat, Classify, ClassifyIds, EmbedIds, GenerateIds, Request

MAX_TOOLS = 128


def check_prompt(request: Request, rules: Rules, *, has_template: bool) -> None:
    """Refuse what this checkpoint cannot read, and what is too much of it."""
    if isinstance(request, GenerateIds | EmbedIds | ClassifyIds):
        return
    if not rules.takes_text:
        raise invalid("prompt", "text", "token ids: this checkpoint has no tokenizer")
    if isinstance(request, Chat):
        _check_conversation(request, rules, has_template=has_template)
        return
    cut = most_tokens(request, rules) is not None
    pair = request.pair if isinstance(request, Classify) else None
    if not cut or pair is not None:
        check_text_length(request.prompt, rules)
    if not cut and pair is not None:
        check_text_length(pair, rules)


def _check_conversation(request: Chat, rules: Rules, *, has_template: bool) -> None:
    if not has_template:
        raise invalid("prompt", "a conversation", "a text or token ids: this checkpoint has no chat template")
    if not 1 <= len(request.messages) <= MAX_CHAT_MESSAGES:
        raise Refusal("invalid_request", f"messages has {len(request.messages)}; want 1 to {MAX_CHAT_MESSAGES}")
    if len(request.options.tools) > MAX_TOOLS:
        raise Refusal("invalid_request", f"tools has {len(request.options.tools)}; want at most {MAX_TOOLS}")
    for message in request.messages:
        if message.content is None and not message.tool_calls:  # some templates would write "None"
            text = f"messages has one of {short(message.role)} without content; want text, or tool_calls"
            raise Refusal("invalid_request", text)
        check_text_length(message.text, rules)


def check_depth(chat: Chat) -> None:
    """Refuse tools and calls that are nested too deep, before a template walks through them."""
    if is_nested_deeper(list(chat.options.tools), MAX_LEVELS + 1):
        raise Refusal("invalid_request", f"tools has one nested deeper than {MAX_LEVELS} levels; want at most those")
    for message in chat.messages:
        for call in message.tool_calls:
            if is_nested_deeper(call.function.arguments, MAX_LEVELS):
                text = f"messages has arguments of a call nested deeper than {MAX_LEVELS} levels; want at most those"
                raise Refusal("invalid_request", text)
