"""A chat template that shows turns in the harmony format, as particular about them as that of gpt-oss, its tokens, and
a model that is played.

It shows one call of a turn and no later turn of the system, and fails on a content that is null.
"""

from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec
from tokenizers import AddedToken, Tokenizer

from tercet.engine.harmony import MARKS
from tercet.ipc.beyond import Logs
from tercet.ipc.step_messages import Ended
from tokenizer_process import USAGE, TokenizerProcess, byte_checkpoint, byte_tokenizer, tokens

TEMPLATE = """{%- set effort = reasoning_effort if reasoning_effort is defined else 'medium' -%}
<|start|>system<|message|>{{ 'Effort: ' + effort }}{{ strftime_now('') }}<|end|>
{%- set ns = namespace(called=none) -%}
{%- set first = messages[0].content if messages[0].role in ['system', 'developer'] else '' -%}
{%- if first or tools -%}
<|start|>developer<|message|>{{ first }}
{%- for tool in tools or [] %}{{ '[' + tool.function.description + '|' + tool.function.name + ']' }}{% endfor -%}
<|end|>
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- if 'content' in m and '<|channel|>' in m.content %}{{ raise_exception('want messages without marks') }}{% endif -%}
{%- if 'tool_calls' in m -%}
{%- if m.content and m.thinking %}{{ raise_exception('want content or thinking beside calls') }}{% endif -%}
{%- set thought = m.thinking or m.content -%}
{%- if thought -%}<|start|>assistant<|channel|>analysis<|message|>{{ thought }}<|end|>{%- endif -%}
{%- set ns.called = m.tool_calls[0].function.name -%}
<|start|>assistant to=functions.{{ ns.called }}<|channel|>commentary json<|message|>
{{- m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- else -%}
<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- endif -%}
{%- elif m.role == 'tool' -%}
{%- if ns.called is none %}{{ raise_exception('want a call before what came of it') }}{% endif -%}
<|start|>functions.{{ ns.called }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>
{%- elif m.role == 'user' -%}
<|start|>user<|message|>{{ m.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}"""


def harmony_tokenizer() -> Tokenizer:
    """Of bytes, and the marks, which are special."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return tokenizer


def harmony_checkpoint(folder: Path) -> Path:
    """What the tokenizer process reads."""
    byte_checkpoint(folder, TEMPLATE)
    tokenizer = harmony_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = [tokenizer.token_to_id(mark) for mark in ("<|return|>", "<|call|>")]
    (folder / "generation_config.json").write_bytes(msgspec.json.encode({"eos_token_id": ends}))
    return folder


def play(
    engine: TokenizerProcess, number: int, ids: Sequence[int], *, logged: bool = False, is_whole: bool = True
) -> None:
    """A step for each token; the last ends the answer if that `is_whole`."""
    ends = {harmony_tokenizer().token_to_id(mark) for mark in ("<|return|>", "<|call|>")}
    for place, token_id in enumerate(ids):
        ended = Ended(number, "stop" if token_id in ends else "length", token_id if token_id in ends else None, USAGE)
        step = tokens({number: token_id}, ended if is_whole and place == len(ids) - 1 else None)
        if logged:  # a log-probability that says its place
            words = array("f", [-float(place)]).tobytes() + array("i", [1]).tobytes()
            step = msgspec.structs.replace(step, logs=Logs(array("i", [0]).tobytes(), 0, words))
        engine.send(step)
