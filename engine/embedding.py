"""What becomes of a prompt's last hidden state: an embedding, as its request wants it."""

import numpy as np
from msgspec import structs

from tercet.engine.refusal import Refusal, check_range
from tercet.engine.request_check import Rules
from tercet.ipc.answers import Embedded, Failed, Usage
from tercet.ipc.messages import EmbeddingParams


def check_embedding(params: EmbeddingParams, rules: Rules) -> None:
    """Refuse what this engine's model does not give."""
    if not rules.limits.hidden_size:
        raise Refusal("not_supported", "this engine computes nothing (--load-format null), and no embeddings")
    if rules.pooling.refusal is not None:
        raise Refusal("not_supported", f"this checkpoint's embeddings are not supported: {rules.pooling.refusal}")
    if params.dimensions is not None:
        check_range("dimensions", params.dimensions, 1, rules.limits.hidden_size)


def resolve_embedding(params: EmbeddingParams, rules: Rules) -> EmbeddingParams:
    """Its defaults filled in."""
    return params if params.normalize is not None else structs.replace(params, normalize=rules.pooling.normalized)


def embedded(request_id: str, hidden: bytes, params: EmbeddingParams, usage: Usage) -> Embedded | Failed:
    """`hidden`: fp32; `params`: resolved. Sums are in fp64, so that a length is 1 to the last bits of fp32."""
    values = np.frombuffer(hidden, np.float32)[: params.dimensions].astype(np.float64)
    if params.normalize:
        values /= np.linalg.norm(values) or 1.0
    if not np.isfinite(values).all():
        text = "the prompt's hidden state has numbers that are none: the model overflows its type (--dtype)"
        return Failed(request_id, "not_supported", text)
    return Embedded(request_id, values.astype(np.float32).tobytes(), structs.replace(usage, num_generated_tokens=0))
