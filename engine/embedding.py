"""A request for an embedding: what is wrong with it, what it is to the engine, and its end."""

import msgspec

from tercet.engine.refusal import Refusal, check_range
from tercet.engine.request_check import Rules, adapter_index
from tercet.ipc.answers import Embedded, Failed, Usage
from tercet.ipc.messages import EmbeddingParams
from tercet.ipc.step_messages import Embedding


def check_embedding(params: EmbeddingParams, rules: Rules) -> None:
    """Refuse what this engine's model does not give."""
    if rules.pooling.refusal is not None:
        raise Refusal("not_supported", f"this checkpoint's embeddings are not supported: {rules.pooling.refusal}")
    if params.dimensions is not None:
        check_range("dimensions", params.dimensions, 1, rules.limits.hidden_size)
    adapter_index(params.adapter, rules)


def resolve_embedding(params: EmbeddingParams, rules: Rules) -> Embedding:
    """Every default filled in, for checked parameters."""
    dimensions = rules.limits.hidden_size if params.dimensions is None else params.dimensions
    return Embedding(dimensions, rules.pooling.normalized if params.normalize is None else params.normalize)


def embedded(request_id: str, values: bytes, usage: Usage) -> Embedded | Failed:
    """`values`: as of a `Vector`. The token that was sampled is not told."""
    if not values:
        text = "the embedding has numbers that are none: the model overflows its type; want another --dtype"
        return Failed(request_id, "not_supported", text)
    return Embedded(request_id, values, msgspec.structs.replace(usage, num_generated_tokens=0))
