"""What experts make of a token on the CPU in fp32: the same to the bit whatever other tokens there are.

That it is right is tested against transformers, by `test_model_decoder.py`.
"""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import make_checkpoint
from loaded_weights import load
from tercet.model.checkpoint import read_config
from tercet.model.expert_products import ReorderedExperts
from tercet.model.experts import go_through_experts
from tercet.model.rank_weights import ExpertWeights
from tercet.model.reordered import reordered_for_cpu

COUNT = 300


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3-moe", {}),
        ("qwen2-moe", {}),
        ("gpt-oss", {}),
        ("deepseek-v3", {"n_routed_experts": 32}),  # vectors of sigmoids have no end of their own
    ],
)
def test_in_any_company(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path, **overrides)
    blocks = [layer.mlp for layer in reordered_for_cpu(load(path)).layers]
    weights = next(block for block in blocks if isinstance(block, ExpertWeights))
    assert isinstance(weights.gate_up_E2FD, ReorderedExperts)
    experts = read_config(path).experts
    assert experts is not None
    through = partial(
        go_through_experts, weights=weights, experts=experts, deterministic=False, counts_biases=True
    )  # fmt: skip
    seed = random.randrange(2**31)
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(COUNT, 64, generator=generator) * 2
    alone_TD = torch.cat([through(x_D[None], None) for x_D in x_TD])
    assert torch.equal(through(x_TD, None), alone_TD), seed
    for count in (2, 3, 4, 5, 17, 64, 170, COUNT):
        some = torch.randperm(COUNT, generator=generator)[:count]
        assert torch.equal(through(x_TD[some], None), alone_TD[some]), (seed, count)
        rows = torch.tensor([count - 1], dtype=torch.int32)
        assert torch.equal(through(x_TD[some], rows)[:-1], alone_TD[some[:-1]]), (seed, count)
