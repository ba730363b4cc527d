"""Words for a request that has no room in the model's context, which the engine refuses, or a client ahead of it."""


def context_length(max_model_len: int) -> str:
    """In the words by which clients know (LiteLLM among them) that a shorter prompt is what is wanted."""
    return f"this model's maximum context length is {max_model_len}"


def too_many_tokens(max_tokens: int, num_prompt: int, max_model_len: int) -> str:
    """More than there is room for behind the prompt."""
    return (
        f"max_tokens is {max_tokens}; want at most {max_model_len - num_prompt}: {context_length(max_model_len)}, and "
        f"the prompt has {num_prompt} tokens"
    )
