"""What a turn says, as chat templates know it: a text, or where there are images a list of parts. Pure.

Templates do not get the images themselves; they write what keeps their places.
"""

from typing import Any

from tercet.ipc.content import Content, TextPart, as_content

Shown = str | list[dict[str, Any]] | None


def shown(content: Content) -> Shown:
    """Templates of models that see nothing know texts alone."""
    content = as_content(content) if isinstance(content, tuple) else content
    if not isinstance(content, tuple):
        return content
    return [{"type": "text", "text": one.text} if isinstance(one, TextPart) else {"type": "image"} for one in content]


def with_mark(content: str | list[dict[str, Any]], mark: str) -> Shown:
    """Behind its end; None: that is no text."""
    if isinstance(content, str):
        return content + mark
    if not content or content[-1]["type"] != "text":
        return None
    return [*content[:-1], {"type": "text", "text": content[-1]["text"] + mark}]
