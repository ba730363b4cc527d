"""Chat templates against transformers' own rendering, and what a template may not do."""

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from harmony_style import TEMPLATE as HARMONY
from mistral_style import LISTED, NAMED
from tercet.engine.chat_template import ChatTemplate, TemplateRefused
from tercet.engine.errors import UnsupportedModel
from tercet.ipc.messages import ChatMessage, ChatOptions, FunctionCall, ToolCall

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

JSON = """{%- for m in messages %}{{ m | tojson(ensure_ascii=False) }}{{ m | tojson(ensure_ascii=True, indent=1) }}
{{- m | tojson(separators=(',', ':'), sort_keys=True) }}{{ m | tojson(true, 3) }}{% endfor %}"""

CONVERSATIONS = [
    [("user", "hi")],
    [("system", "be brief"), ("user", "<b>&amp; \"quotes\" 'é'</b>")],
    [("user", "1 "), ("assistant", " 2"), ("user", "{{ messages }} {% raw %}")],
    [("user", "a"), ("skip", "b"), ("user", "c\n"), ("user", "d"), ("user", "e")],
]


@pytest.mark.parametrize("template", [CHATML, LLAMA2, TRICKY, JSON])
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


@pytest.mark.parametrize("content", ["", "The", "The cat\n\nsat", "\uf8ff\uf8ff", "{{ x }}"])
@pytest.mark.parametrize(
    "template", [CHATML, LLAMA2, CHATML.replace("message['content']", "message['content'] | trim")]
)
def test_a_last_turn_that_goes_on(template: str, content: str) -> None:
    conversation = [("user", "hi \uf8ff"), ("assistant", content)]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    ours = ChatTemplate(template, special).render(
        [ChatMessage(*turn) for turn in conversation], ChatOptions(ending="continued")
    )
    (wanted,), _ = render_jinja_template(
        conversations=[[{"role": role, "content": content} for role, content in conversation]],
        chat_template=template,
        continue_final_message=True,
        **special,
    )
    assert ours == wanted if content else ours.rstrip().endswith(("assistant", "[/INST]"))
    assert ours.endswith(content)


def test_what_is_written_is_what_goes_on() -> None:
    """Blanks at its end, too, which a template would take off."""
    turns = [ChatMessage("user", "hi"), ChatMessage("assistant", "a poem:\n\n ")]
    assert (
        ChatTemplate(LLAMA2, {"bos_token": "", "eos_token": ""})
        .render(turns, ChatOptions(ending="continued"))
        .endswith(" a poem:\n\n ")
    )


def test_a_conversation_that_just_ends() -> None:
    turns, template = [ChatMessage("user", "hi")], ChatTemplate(CHATML, {})
    reply, none = (template.render(turns, ChatOptions(ending=ending)) for ending in ("reply", "none"))  # type: ignore[arg-type]
    assert reply == none + "<|im_start|>assistant\n"


def test_no_turn_that_could_go_on() -> None:
    called = ChatMessage("assistant", "x", tool_calls=(ToolCall(id="", function=FunctionCall("f", {})),))
    ending, hi = ChatOptions(ending="continued"), ChatMessage("user", "hi")
    for turn, template, what in (
        (hi, CHATML, "messages ends with a turn of the user; want the assistant's text"),
        (ChatMessage("assistant"), CHATML, "messages ends with a turn of the assistant; want the assistant's text"),
        (called, CHATML, "messages ends with calls; want the assistant's text"),
        (ChatMessage("assistant", "x"), "{{ messages | length }}", "does not show the last turn's text"),
    ):
        with pytest.raises(TemplateRefused, match=what):
            ChatTemplate(template, {}).render([hi, turn], ending)


TOOLS = """{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>
{%- if m.content is none %}(nothing){% else %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}{{ call.id }}: {{ call.function.name }} {{ call.function.arguments | tojson }}
{%- endfor %}{{ m.name }}{{ m.tool_call_id }}{% if m.reasoning_content is defined %}{{ m.reasoning_content }}{% endif %}
{%- endfor %}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"""


def test_tools_that_the_model_would_not_see() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    assert template.render([ChatMessage("user", "hi")], ChatOptions()) == "hi"
    with pytest.raises(TemplateRefused, match="tools has 1; want none"):
        template.render([ChatMessage("user", "hi")], ChatOptions(tools=({"type": "function"},)))


def test_a_template_for_tools_is_asked_where_tools_come() -> None:
    template = ChatTemplate(CHATML, {}, tool_use="{{ tools | length }}<tool_call>")
    tool = {"type": "function", "function": {"name": "f"}}
    assert template.tool_format == "hermes"
    assert template.render([ChatMessage("user", "hi")], ChatOptions(tools=(tool,))) == "1<tool_call>"
    assert template.render([ChatMessage("user", "hi")]) == ChatTemplate(CHATML, {}).render([ChatMessage("user", "hi")])
    with pytest.raises(UnsupportedModel, match="chat template"):
        ChatTemplate(CHATML, {}, tool_use="{% for %}")


@pytest.mark.parametrize(
    ("shown", "tool_format"),
    [
        ('<tool_call>\n{"name": <function-name>}\n</tool_call>', "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=x>\n</function>\n</tool_call>", "qwen3_coder"),
        ("<tool_call>{function-name}\n<arg_key>{key}</arg_key>\n</tool_call>", "glm"),
        ("<tool_call>{function-name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>", "glm"),
        ('<minimax:tool_call>\n<invoke name="f">\n</invoke></minimax:tool_call>', "minimax"),
    ],
)
def test_templates_show_how_calls_are_written(shown: str, tool_format: str) -> None:
    template = ChatTemplate("{% if tools %}" + json.dumps(shown).replace("{", "{{ '{' }}") + "{% endif %}", {})
    assert template.tool_format == tool_format


def test_tools_are_rendered_as_transformers_does() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "é": [1, 2.5, None]}}}
    call = {"id": "abc", "type": "function", "function": {"name": "f", "arguments": {"x": ["é", {"y": 1}]}}}
    theirs = [
        {"role": "user", "content": "hi", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "12", "tool_call_id": "abc"},
    ]
    ours = [
        ChatMessage("user", "hi", "Ann"),
        ChatMessage(
            "assistant",
            tool_calls=(ToolCall(id="abc", function=FunctionCall("f", {"x": ["é", {"y": 1}]})),),
            reasoning_content="hm",
        ),
        ChatMessage("tool", "12", tool_call_id="abc"),
    ]
    (wanted,), _ = render_jinja_template([theirs], tools=[tool], chat_template=TOOLS, enable_thinking=False)
    template = ChatTemplate(TOOLS, {})
    assert template.render(ours, ChatOptions(tools=(tool,), template_kwargs={"enable_thinking": False})) == wanted
    assert "False" in wanted


@pytest.mark.parametrize(
    ("source", "formats"),
    [
        (CHATML, ("none", "none")),
        ("{% if tools %}<tool_call>{% endif %}{{ '</think>' if messages[7] }}x", ("hermes", "think")),
        (
            "{% if tools %}<|python_tag|>{% endif %}<think>{% if false %}</think>{% endif %}\n",
            ("llama3", "think_opened"),
        ),
        ("{% if tools %}<minimax:tool_call>{% endif %}</think>", ("minimax", "think")),
        ("{% if tools %}[TOOL_CALLS]{% endif %}{{ raise_exception('no') }}</think>", ("mistral", "think")),
        ("{% if tools %}[TOOL_CALLS]{% endif %}[THINK]{{ messages[0].thought }}[/THINK]", ("mistral", "bracketed")),
        ("{{ '<think>' if thinking is not defined or thinking else '</think>' }}", ("none", "think_by_default")),
        ("{{ '<think>' if enable_thinking else '</think>' }}", ("none", "think_on_request")),
        (HARMONY, ("harmony", "harmony")),
    ],
)
def test_a_template_shows_how_its_model_writes(source: str, formats: tuple[str, str]) -> None:
    template = ChatTemplate(source, {})
    assert (template.tool_format, template.reasoning_format) == formats


CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}[TOOL_CALLS](call){% endfor %}{% endfor %}{{ tools }}"


@pytest.mark.parametrize(
    ("source", "tool_format"),
    [
        (LISTED, "mistral"),
        (NAMED, "mistral_named"),
        (CALLS.replace("(call)", "{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"), "mistral_named"),
        (CALLS.replace("(call)", "{{ c.function.name }}{{ c.function.arguments | tojson }}"), "mistral_named"),
        (CALLS.replace("(call)", " [{{ c.function | tojson }}]"), "mistral"),
        (CALLS.replace("(call)", "f") + "{{ raise_exception('no') }}", "mistral"),
    ],
)
def test_mistral_s_templates_show_calls_by_name_or_in_a_list(source: str, tool_format: str) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    assert ChatTemplate(source, special).tool_format == tool_format
    assert ChatTemplate(CHATML, special, tool_use=source).tool_format == tool_format


@pytest.mark.parametrize("heard", ["enable_thinking", "thinking"])
def test_thinking_has_two_names(heard: str) -> None:
    template = ChatTemplate(f"{{{{ {heard} is defined and {heard} }}}}", {})
    turns = [ChatMessage("user", "x")]
    for name in ("enable_thinking", "thinking"):
        for thinks in (True, False):
            assert template.render(turns, ChatOptions(template_kwargs={name: thinks})) == str(thinks)
        with pytest.raises(TemplateRefused, match=f"'no'. for {name}; want true or false"):
            template.render(turns, ChatOptions(template_kwargs={name: "no"}))
    assert template.render(turns) == "False"
    assert template.render(turns, ChatOptions(template_kwargs={"enable_thinking": True, "thinking": True})) == "True"
    with pytest.raises(TemplateRefused, match="under one name"):
        template.render(turns, ChatOptions(template_kwargs={"enable_thinking": True, "thinking": False}))


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
