"""Chat templates that show calls as Mistral's do, as strict about turns and ids as theirs, and tokens to write them.

LISTED writes calls in a list, as the templates of Mistral-7B-Instruct-v0.3 and Mistral-Nemo do. NAMED writes a name and
arguments for each, as that of Mistral-Small-3.2 does.
"""

TOKENS = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
"""Special ones in their tokenizers, the last two in newer ones only."""

_AROUND = """{%- macro check(id) -%}
{%- if id is not string or id | length != 9 or not id.isalnum() -%}
{{ raise_exception('want ids of nine letters and digits, not ' ~ id) }}
{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set ns = namespace(turns=0, asked=0) -%}
{%- for m in messages if m.role == 'user' %}{% set ns.asked = ns.asked + 1 %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) -%}
{%- if (m.role == 'user') != (ns.turns % 2 == 0) %}{{ raise_exception('want user and assistant in turn') }}{% endif -%}
{%- set ns.turns = ns.turns + 1 -%}
{%- endif -%}
{%- if m.role == 'user' -%}
{%- if tools and ns.turns == 2 * ns.asked - 1 -%}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif -%}
[INST]{{ m.content }}[/INST]
{%- elif m.role == 'assistant' and m.tool_calls -%}
(calls){{ eos_token }}
{%- elif m.role == 'assistant' -%}
{{ m.content }}{{ eos_token }}
{%- elif m.role == 'tool' -%}
{{- check(m.tool_call_id) -}}[TOOL_RESULTS]{{ m.content }}, {{ m.tool_call_id }}[/TOOL_RESULTS]
{%- endif -%}
{%- endfor -%}"""
_LIST = """[TOOL_CALLS][
{%- for c in m.tool_calls -%}
{{- check(c.id) -}}{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{{ '' if loop.last else ', ' }}
{%- endfor -%}]"""
_NAMES = """{%- for c in m.tool_calls -%}
{{- check(c.id) -}}[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}
{%- endfor -%}"""

LISTED = _AROUND.replace("(calls)", _LIST)
NAMED = _AROUND.replace("(calls)", _NAMES)
