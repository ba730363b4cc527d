"""What transformers makes of prompts: the hidden state of their last token, behind the final norm."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from checkpoints import checkpoint, reference_model


def last_hidden(of: Any, prompts: list[list[int]]) -> list[NDArray[np.float64]]:
    """Of each prompt, as it is. `of`: a family's tiny checkpoint, or a model of transformers."""
    model = reference_model(checkpoint(of)) if isinstance(of, str) else of
    with torch.inference_mode():
        return [model.model(torch.tensor([prompt])).last_hidden_state[0, -1].double().numpy() for prompt in prompts]


def unit(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """With the length 1."""
    normed: NDArray[np.float64] = values / np.linalg.norm(values)
    return normed
