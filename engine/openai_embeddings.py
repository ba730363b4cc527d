"""What OpenAI's clients send for embeddings, and what they read. Beyond OpenAI's fields there are the engine's own."""

import base64
from array import array
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from tercet.engine.json_parts import encode
from tercet.engine.openai_messages import Int
from tercet.engine.openai_prompts import read_prompts
from tercet.engine.openai_requests import check_seconds
from tercet.ipc.messages import ClassificationParams, EmbeddingParams

MAX_INPUTS = 2048


class AsksForVectors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every body may say for whose answer the engine is asked for embeddings, or to classify."""

    model: str | None = None
    user: Annotated[str, msgspec.Meta(max_length=512)] | None = None
    cache_salt: str | None = None
    priority: Int | None = None
    truncate_prompt_tokens: Int | None = None
    """As vLLM has it: the end of a longer text is cut off."""
    queue_timeout: float | None = None
    """Seconds that each input may wait for its turn."""
    timeout: float | None = None
    """Seconds that all of it may take."""

    def check(self) -> None:
        """What the engine does not look at."""
        check_seconds(self.timeout)

    def to_classification(self, adapter: str | None) -> ClassificationParams:
        """Where the engine is asked to classify."""
        return ClassificationParams(adapter=adapter, truncate_prompt_tokens=self.truncate_prompt_tokens)


def named_inputs(value: str | list[Any]) -> dict[str, str | list[int]]:
    """The prompts of a body's `input`, in their order, by what an error calls them."""
    prompts = read_prompts("input", value, MAX_INPUTS)
    return {f"input[{index}]" if len(prompts) > 1 else "input": one for index, one in enumerate(prompts)}


class EmbeddingsRequest(AsksForVectors, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/embeddings."""

    input: str | list[Any]
    dimensions: Int | None = None
    """The first so many numbers: of use with models that were trained for it."""
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None
    """Whether each embedding has the length 1; as the checkpoint says, if this does not."""

    def to_prompts(self) -> dict[str, str | list[int]]:
        """See there."""
        return named_inputs(self.input)

    def to_params(self, adapter: str | None) -> EmbeddingParams:
        """The same for all."""
        return EmbeddingParams(
            dimensions=self.dimensions,
            normalize=self.normalize,
            adapter=adapter,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )

    def write(self, values: "array[float]") -> Iterator[bytes]:
        """One embedding as JSON, not before it is wanted."""
        yield encode(base64.b64encode(values).decode() if self.encoding_format == "base64" else values.tolist())


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Of all inputs together."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(msgspec.Struct, frozen=True):
    """Of one input. In base64, it is of fp32 in little endian."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage
