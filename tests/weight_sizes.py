"""How many numbers a model's matrices have, reckoned from its sizes; biases and norms are left out (thousandths)."""

from tercet.model.config import ModelConfig


def num_in_matrices(config: ModelConfig, num_ranks: int = 1) -> int:
    """On each rank."""
    query, kv = config.num_heads // num_ranks * config.head_dim, config.kv_heads_per_rank(num_ranks) * config.head_dim
    heads, mlp = 2 * query + 2 * kv, 3 * config.intermediate_size // num_ranks
    inner = config.num_layers * (heads + mlp)
    if (experts := config.experts) is not None:
        many = experts.count * (1 + 3 * experts.intermediate_size // num_ranks)
        inner += len(experts.layers) * (many - mlp)
    vocab = config.hidden_size * config.vocab_per_rank(num_ranks) * (1 if config.tie_word_embeddings else 2)
    return config.hidden_size * inner + vocab
