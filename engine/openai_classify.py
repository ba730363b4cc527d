"""What is sent to have texts classified, in vLLM's shapes, and what is read."""

from typing import Any, Literal

import msgspec

from tercet.engine.openai_embeddings import AsksForVectors, EmbeddingUsage, named_inputs


class ClassifyBody(AsksForVectors, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /classify."""

    input: str | list[Any]
    use_activation: bool | None = None
    """Whether logits become what the model was trained to say; they do, if this does not say."""

    def to_prompts(self) -> dict[str, str | list[int]]:
        """See there."""
        return named_inputs(self.input)


class ClassifyItem(msgspec.Struct, frozen=True):
    """Of one input."""

    index: int
    label: str
    """The likeliest."""
    probs: list[float]
    num_classes: int


class ClassifyList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassifyItem]
    usage: EmbeddingUsage
