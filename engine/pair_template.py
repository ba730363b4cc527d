"""What is written around two texts that are read as one prompt: a query and a document, by `--pair-template`.

The template sees `query` and `document`, the same as `messages` of these roles, as vLLM's templates for scores want
them, and the special tokens. It is the operator's file and runs in the sandbox of chat templates.
"""

from collections.abc import Mapping

from tercet.engine.chat_template import compiled, read_template, rendered
from tercet.engine.errors import UnsupportedModel


class PairTemplate:
    """One file's."""

    def __init__(self, file: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: such as `bos_token`, for the template to name."""
        self.source = read_template(file, "--pair-template")
        self._template = compiled(self.source, f"--pair-template: {file}")
        self._special_tokens = special_tokens
        shown = self.render("a query", "a document")
        if missing := [text for text in ("a query", "a document") if text not in shown]:
            raise UnsupportedModel(f"--pair-template: {file} does not show {' and '.join(missing)}; want both texts")

    def render(self, query: str, document: str) -> str:
        """Raises `TemplateRefused`."""
        return rendered(
            self._template,
            "the pair template",
            query=query,
            document=document,
            messages=[{"role": "query", "content": query}, {"role": "document", "content": document}],
            add_generation_prompt=True,
            **self._special_tokens,
        )
