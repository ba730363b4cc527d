"""What transformers makes of prompts: the hidden state of their last token, behind the final norm."""

import numpy as np
import torch
from numpy.typing import NDArray

from checkpoints import checkpoint, reference_model


def last_hidden(family: str, prompts: list[list[int]]) -> list[NDArray[np.float64]]:
    """Of each prompt, as it is."""
    model = reference_model(checkpoint(family)).model
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).last_hidden_state[0, -1].double().numpy() for prompt in prompts]


def unit(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """With the length 1."""
    normed: NDArray[np.float64] = values / np.linalg.norm(values)
    return normed
