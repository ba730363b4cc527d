"""Chat templates that show calls in sections, as those of DeepSeek's models and Kimi K2 do, and what models write.

FENCED is as DeepSeek-V3's and R1's, which open the reasoning for the model unless a tool has answered, and take a
call's arguments as objects; PLAIN as V3.1's, which takes them as JSON only. KIMI shows a call by its id alone.
"""

_DEEPSEEK = """{%- set ns = namespace(behind='') -%}
{{- bos_token -}}
{%- if tools -%}{%- for tool in tools %}{{ tool | tojson }}{% endfor -%}{%- endif -%}
{%- for m in messages -%}
{%- set ns.behind = m.role -%}
{%- if m.role == 'user' -%}{{ '<｜User｜>' + m.content + '<｜Assistant｜>' }}
{%- elif m.role == 'assistant' and m.tool_calls is defined -%}
{{ m.content if m.content is not none else '' }}<｜tool▁calls▁begin｜>
{%- for c in m.tool_calls -%}(call){%- endfor -%}
<｜tool▁calls▁end｜><｜end▁of▁sentence｜>
{%- elif m.role == 'assistant' -%}{{ m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
{%- elif m.role == 'tool' -%}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and ns.behind == 'user' -%}(opening){%- endif -%}"""
_FENCED_CALL = (
    "{{ '' if loop.first else '\\n' }}{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + "
    "'\\n```json\\n' + c.function.arguments | tojson + '\\n```<｜tool▁call▁end｜>' }}"
)
_PLAIN_CALL = (
    "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}"
)

FENCED = _DEEPSEEK.replace("(call)", _FENCED_CALL).replace("(opening)", "{{ '<think>\\n' }}")
PLAIN = _DEEPSEEK.replace("(call)", _PLAIN_CALL).replace("(opening)", "{{ '<think>' if thinking else '</think>' }}")
KIMI = """{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
{%- for m in messages -%}
<|im_{{ m.role }}|>{{ m.get('name') or m.role }}<|im_middle|>
{%- if m.role == 'assistant' and m.get('tool_calls') -%}
{{ m.content or '' }}<|tool_calls_section_begin|>
{%- for c in m.tool_calls -%}
<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>
{%- endfor -%}<|tool_calls_section_end|>
{%- elif m.role == 'tool' -%}{{ '## Return of ' + m.tool_call_id + '\\n' + m.content }}
{%- else -%}{{ m.content }}
{%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif -%}"""


def as_fenced(*calls: tuple[str, str]) -> str:
    each = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def as_plain(*calls: tuple[str, str]) -> str:
    each = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>" for name, arguments in calls]
    return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"


def as_kimi(*calls: tuple[str, str], first: int = 0) -> str:
    each = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls, first)
    ]
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"
