"""Requests for what a model makes of a prompt but text, embeddings and what a head classifies: what is wrong with one,
what it is to the engine, and its end."""

import msgspec

from tercet.engine.refusal import Refusal, check_range
from tercet.engine.request_check import Rules, adapter_named
from tercet.ipc.answers import Classified, Embedded, Failed, Usage
from tercet.ipc.messages import ClassificationParams, ClassifyRequest, EmbeddingParams, EmbedRequest, Request
from tercet.ipc.step_messages import Embedding


def check_made(request: Request, rules: Rules) -> None:
    """Refuse what this engine's model does not give: a text, an embedding, logits of labels."""
    if isinstance(request, EmbedRequest):
        _check_embedding(request.embedding, rules)
    elif isinstance(request, ClassifyRequest):
        if rules.limits.classifier is None:
            text = "this checkpoint has no score.weight, the head of a model that classifies; want --classifier-tokens"
            raise Refusal("not_supported", text)
        adapter_named(request.classification.adapter, rules)
    elif not rules.limits.generates:
        use = "for embeddings" if rules.limits.classifier is None else "to classify, and for embeddings"
        text = f"the checkpoint has no lm_head.weight, which makes logits: it is {use}; want one that has it"
        raise Refusal("not_supported", text)


def _check_embedding(params: EmbeddingParams, rules: Rules) -> None:
    if rules.pooling.refusal is not None:
        raise Refusal("not_supported", f"this checkpoint's embeddings are not supported: {rules.pooling.refusal}")
    if params.dimensions is not None:
        check_range("dimensions", params.dimensions, 1, rules.limits.hidden_size)
    adapter_named(params.adapter, rules)


def resolve_made(params: EmbeddingParams | ClassificationParams, rules: Rules) -> Embedding:
    """Every default filled in, for checked parameters."""
    size = rules.limits.hidden_size
    if isinstance(params, ClassificationParams):
        return Embedding(size, normalize=False, classify=True)
    dimensions = size if params.dimensions is None else params.dimensions
    return Embedding(dimensions, rules.pooling.normalized if params.normalize is None else params.normalize)


def made(request_id: str, how: Embedding, values: bytes, usage: Usage) -> Embedded | Classified | Failed:
    """`values`: as of a `Vector`. The token that was sampled is not told."""
    if not values:
        what = "logits have" if how.classify else "the embedding has"
        text = f"{what} numbers that are none: the model overflows its type; want another --dtype"
        return Failed(request_id, "not_supported", text)
    kind = Classified if how.classify else Embedded
    return kind(request_id, values, msgspec.structs.replace(usage, num_generated_tokens=0))
