"""Chat templates against transformers' own rendering, and what a template may not do."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tercet.engine.chat_template import ChatTemplate, TemplateRefused
from tercet.engine.errors import UnsupportedModel
from tercet.ipc.messages import ChatMessage

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are helpful<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

LLAMA2 = """{% if messages[0]['role'] == 'system' %}
    {% set loop_messages = messages[1:] %}
    {% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
{% else %}
    {% set loop_messages = messages %}
    {% set system = '' %}
{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ bos_token + '[INST] ' + (system if loop.index0 == 0 else '') + message['content'].strip() + ' [/INST]' }}
    {% else %}
        {{ ' ' + message['content'].strip() + ' ' + eos_token }}
    {% endif %}
{% endfor %}"""

TRICKY = """{%- set ns = namespace(n=0) -%}
{%- for message in messages -%}
    {%- if message.role == 'skip' %}{% continue %}{% endif -%}
    {%- set ns.n = ns.n + 1 -%}
    {{ ns.n }}: {{ message | tojson }}{{ message.content | tojson(indent=2) }}
    {%- generation %}|{{ message.role }}{% endgeneration %}
    {% if ns.n > 3 %}{% break %}{% endif %}
{% endfor %}
{%- if tools is none and not documents and missing is not defined %}no tools{% endif %}"""

CONVERSATIONS = [
    [("user", "hi")],
    [("system", "be brief"), ("user", "<b>&amp; \"quotes\" 'é'</b>")],
    [("user", "1 "), ("assistant", " 2"), ("user", "{{ messages }} {% raw %}")],
    [("user", "a"), ("skip", "b"), ("user", "c\n"), ("user", "d"), ("user", "e")],
]


@pytest.mark.parametrize("template", [CHATML, LLAMA2, TRICKY])
def test_renders_as_transformers_does(template: str) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    ours = ChatTemplate(template, special)
    num_rendered = 0
    for conversation in CONVERSATIONS:
        try:
            (wanted,), _ = render_jinja_template(
                conversations=[[{"role": role, "content": content} for role, content in conversation]],
                chat_template=template,
                add_generation_prompt=True,
                **special,
            )
        except Exception:  # noqa: BLE001  what their template raises, ours refuses
            with pytest.raises(TemplateRefused):
                ours.render([ChatMessage(*turn) for turn in conversation])
            continue
        assert ours.render([ChatMessage(*turn) for turn in conversation]) == wanted
        num_rendered += 1
    assert num_rendered >= 3


def test_what_a_template_refuses_is_told() -> None:
    template = ChatTemplate(LLAMA2, {"bos_token": "<s>", "eos_token": "</s>"})
    with pytest.raises(TemplateRefused, match="Conversation roles must alternate"):
        template.render([ChatMessage("assistant", "x")])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ messages[7].content }}",
        "{{ 1 // 0 }}",
        "{{ messages + 1 }}",
        "{% include 'other' %}",
    ],
)
def test_a_template_that_misbehaves_fails_alone(template: str) -> None:
    with pytest.raises(TemplateRefused):
        ChatTemplate(template, {}).render([ChatMessage("user", "x")])


@pytest.mark.parametrize("template", ["{% for %}", "{{ x", "{% generation %}", "{% unknown %}"])
def test_a_template_that_is_none_is_an_error_at_start(template: str) -> None:
    with pytest.raises(UnsupportedModel, match="chat template"):
        ChatTemplate(template, {})
