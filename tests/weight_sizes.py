"""How many numbers a model's matrices have, reckoned from its sizes; biases and norms are left out (thousandths)."""

from tercet.model.config import ModelConfig


def num_in_matrices(config: ModelConfig, num_ranks: int = 1) -> int:
    """On each rank."""
    query, kv = config.num_heads // num_ranks * config.head_dim, config.kv_heads_per_rank(num_ranks) * config.head_dim
    layer = config.hidden_size * (2 * query + 2 * kv + 3 * config.intermediate_size // num_ranks)
    vocab = config.hidden_size * config.vocab_per_rank(num_ranks) * (1 if config.tie_word_embeddings else 2)
    return config.num_layers * layer + vocab
