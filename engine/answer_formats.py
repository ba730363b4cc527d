"""How a model writes tool calls and its reasoning: as the settings say, else as its chat template shows."""

from tercet.engine.chat_template import ChatTemplate
from tercet.engine.config import EngineConfig
from tercet.ipc.answers import ReasoningFormat, ToolFormat

_SHOWN = (("mistral", "mistral_named"), ("deepseek", "deepseek_fenced"))
"""Of families with two ways the one that is asked for and the other, where the template says which it is."""


def answer_formats(template: ChatTemplate | None, config: EngineConfig) -> tuple[ToolFormat, ReasoningFormat]:
    """Of both."""
    tools: ToolFormat = "none" if template is None else template.tool_format
    reasoning: ReasoningFormat = "none" if template is None else template.reasoning_format
    asked = config.tool_call_parser
    if asked != "auto" and (asked, tools) not in _SHOWN:
        tools = asked
    if (tools == "harmony") != (reasoning == "harmony"):  # its messages hold both; it is read as a whole, or not
        reasoning = "harmony" if tools in ("harmony", "none") else "none"
    if config.reasoning_parser == "none":
        tools, reasoning = "none" if tools == "harmony" else tools, "none"
    elif config.reasoning_parser == "think" and reasoning == "none":
        reasoning = "think"
    return tools, reasoning
