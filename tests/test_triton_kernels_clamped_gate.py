"""Gates that are kept within limits, against float64: in the interpreter, on a GPU, by the reference."""

import re
from collections.abc import Callable

import pytest
import torch

from interpreted import rerun_interpreted
from places import PLACES, Place
from tercet.triton_kernels.clamped_gate import clamped_gate
from tercet.triton_kernels.dispatch import INTERPRETED


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return Place.of(request)


@pytest.mark.parametrize(("tokens", "each", "inner"), [(1, 1, 64), (9, 4, 1000), (5, 3, 1440)])
def test_gates_within_limits(place: Place, tokens: int, each: int, inner: int) -> None:
    num_experts, limit, slope = 6, 1.75, 1.3
    x, bias = place.random(tokens * each, 2 * inner) * 3, place.random(num_experts, 2 * inner)
    experts = torch.randint(num_experts, (tokens, each)).int()
    experts[tokens // 2 + 1 :] = num_experts  # as padding has
    there = (experts.flatten() < num_experts).to(place.device)
    own = bias[experts.flatten().clamp(max=num_experts - 1).long()]
    for added in (None, bias):
        both = x.double() if added is None else x.double() + own.double()
        gate, up = both[:, 0::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
        exact = (up + 1) * gate * torch.sigmoid(slope * gate)
        got = clamped_gate(x, experts.to(place.device), added, limit, slope, num_experts)
        assert (gate == limit).any(), "limits have been met"
        place.check_rounded(got[there], exact[there])


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            lambda: clamped_gate(torch.zeros(4, 6), torch.zeros(2, 2).int(), torch.zeros(3, 5), 7.0, 1.0, 3),
            "bias: got shape [3, 5], wanted [3, 6]",
        ),
        (
            lambda: clamped_gate(torch.zeros(4, 5), torch.zeros(2, 2).int(), None, 7.0, 1.0, 3),
            "x: got 5 columns, wanted gate and up in turns",
        ),
        (
            lambda: clamped_gate(torch.zeros(4, 6), torch.zeros(2, 2), None, 7.0, 1.0, 3),
            "experts: got torch.float32, wanted torch.int32",
        ),
    ],
)
def test_bad_input(run: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run()


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's own tests")
def test_interpreted() -> None:
    rerun_interpreted(__file__)
