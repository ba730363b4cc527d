"""What transformers makes of a model whose cache holds keys and values in FP8: each number is rounded as it comes."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from checkpoints import greedy, reference_model


class Fp8Cache(DynamicCache):
    """Attention sees nothing but rounded keys and values, those of a prompt's own tokens too."""

    def update(self, keys: Tensor, values: Tensor, *where: Any, **more: Any) -> tuple[Tensor, Tensor]:
        keys, values = (x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) for x in (keys, values))
        return super().update(keys, values, *where, **more)


def fp8_greedy(path: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """As `reference_greedy`, one prompt at a time."""
    model = reference_model(path)
    return [greedy(model, [prompt], num_tokens, past_key_values=Fp8Cache())[0] for prompt in prompts]
