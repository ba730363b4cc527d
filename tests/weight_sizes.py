"""How many numbers a model's matrices have, reckoned from its sizes; biases and norms are left out (thousandths)."""

from tercet.model.blocks import Delta
from tercet.model.config import ModelConfig


def num_in_matrices(config: ModelConfig, num_ranks: int = 1) -> int:
    """On each rank."""
    num_heads, mlp = config.num_heads // num_ranks, _of_mlp(config) * config.intermediate_size // num_ranks
    heads, of_latents = 2 * (num_heads + config.heads.of_rank(num_ranks)) * config.head_dim, 0
    if (latent := config.latent) is not None:
        query = num_heads * config.head_dim
        heads = latent.dim + (latent.q_rank or query) + num_heads * latent.value
        of_latents = latent.q_rank * query + latent.rank * num_heads * (latent.still + latent.value)
    heads += num_heads * config.head_dim if config.gated_attention else 0
    inner = config.num_caching_layers * heads + (config.num_layers - len(config.bare_layers)) * mlp
    if config.carried is not None:
        carried, each = config.carried.of_rank(num_ranks), 2 if isinstance(config.carried, Delta) else 1
        values = carried.value_heads * carried.value_dim
        inner += len(carried.layers) * (carried.channels + 2 * values + each * carried.value_heads)
    if (experts := config.experts) is not None:
        many = experts.count + experts.all * _of_mlp(config) * experts.intermediate_size // num_ranks
        inner += len(experts.layers) * (many - mlp)
    vocab = config.hidden_size * config.vocab_per_rank(num_ranks) * (1 if config.tie_word_embeddings else 2)
    return config.hidden_size * inner + config.num_layers * of_latents + vocab


def _of_mlp(config: ModelConfig) -> int:
    """Matrices."""
    return 3 if config.activation in ("silu", "gelu") else 2
