"""What is sent to have texts compared, as Jina, Cohere and vLLM have it, and what is read."""

from typing import Annotated, Literal

import msgspec

from tercet.engine.http_errors import ApiError
from tercet.engine.openai_embeddings import MAX_INPUTS, AsksForVectors, EmbeddingUsage
from tercet.engine.openai_messages import Int
from tercet.ipc.messages import EmbeddingParams

_SEVERAL = msgspec.Meta(min_length=1, max_length=MAX_INPUTS)
Texts = Annotated[list[str], _SEVERAL]


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of those that are compared with a query."""

    text: str


class Compares(AsksForVectors, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What bodies share that ask for scores."""

    dimensions: Int | None = None
    """Of the embeddings that are compared."""

    def to_params(self, adapter: str | None) -> EmbeddingParams:
        """Of embeddings whose products are cosines."""
        cut = self.truncate_prompt_tokens
        return EmbeddingParams(dimensions=self.dimensions, normalize=True, adapter=adapter, truncate_prompt_tokens=cut)


class RerankRequest(Compares, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/rerank."""

    query: str
    documents: Annotated[list[str | Document], _SEVERAL]
    top_n: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    """So many of the best are told; 0: all."""
    return_documents: bool | None = None
    """Whether results have their documents' texts; they do, if this does not say."""

    def to_texts(self) -> dict[str, str]:
        """The documents, by what an error calls them."""
        texts = [one if isinstance(one, str) else one.text for one in self.documents]
        return {f"documents[{index}]": text for index, text in enumerate(texts)}


class ScoreRequest(Compares, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/score."""

    text_1: str | Texts
    text_2: str | Texts
    """As many as `text_1` has, or any number beside one."""

    def to_texts(self) -> tuple[dict[str, str], dict[str, str]]:
        """Both sides, by what an error calls them."""
        firsts, seconds = _named("text_1", self.text_1), _named("text_2", self.text_2)
        if len(firsts) not in (1, len(seconds)):
            text = f"text_1 has {len(firsts)} texts beside {len(seconds)} of text_2; want one, or as many"
            raise ApiError(400, text, param="text_1")
        return firsts, seconds


def _named(field: str, value: str | list[str]) -> dict[str, str]:
    if isinstance(value, str):
        return {field: value}
    return {f"{field}[{index}]": text for index, text in enumerate(value)}


class RerankResult(msgspec.Struct, frozen=True, kw_only=True):
    """One document."""

    index: int
    """Its place in the request."""
    document: Document | msgspec.UnsetType = msgspec.UNSET
    relevance_score: float


class RerankList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of POST /v1/rerank, the best first."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankResult]


class ScoreItem(msgspec.Struct, frozen=True):
    """Of one pair."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of POST /v1/score, in the order of `text_2`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreItem]
    usage: EmbeddingUsage
