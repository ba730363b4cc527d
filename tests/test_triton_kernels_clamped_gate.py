"""The first product of experts whose gates are kept within limits, against float64: by every kernel that can end so, in
the interpreter, on a GPU, by the reference."""

import re

import pytest
import torch
from torch import Tensor

from interpreted import rerun_interpreted
from places import PLACES, Place
from scaled_weights import meant, mx, scaled, unrounded
from tercet.triton_kernels.clamped_gate import ClampedGate
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.expert_work import deal_out
from tercet.triton_kernels.matmul_experts import expert_tile, matmul_experts_gated
from tercet.triton_kernels.scaled_weight import Weight
from test_triton_kernels_experts import exact_rows

HAVE_GPU = torch.cuda.is_available()
LIMIT, SLOPE = 0.75, 1.3
PLAIN, FP8, FOUR, MX = "plain", "FP8", "four bits", "MXFP4"


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return Place.of(request)


def weights(kind: str, num_experts: int, rows: int, width: int, place: Place) -> Weight:
    match kind:
        case "plain":
            return place.random(num_experts, rows, width) * width**-0.5
        case "MXFP4":
            return mx(num_experts * rows, width, place.device)
        case _:
            return scaled(num_experts * rows, width, 1, place.dtype, place.device, four=kind == FOUR)


@pytest.mark.parametrize(
    ("kind", "tokens", "num_experts", "each", "width", "inner"),
    [(PLAIN, 9, 6, 3, 96, 40), (FP8, 3, 4, 2, 128, 72)]
    + ([(PLAIN, 64, 32, 4, 2880, 2880), (PLAIN, 900, 4, 3, 512, 200)] if HAVE_GPU else [])
    + ([(kind, 40, 8, 2, 1024, 300) for kind in (FP8, FOUR, MX)] if HAVE_GPU else [])
    + ([(kind, 300, 4, 2, 1024, 328) for kind in (FP8, FOUR, MX)] if HAVE_GPU else [])
    + ([(MX, 2, 32, 4, 2880, 2880)] if HAVE_GPU else []),
)
def test_gates_within_limits(
    place: Place, kind: str, tokens: int, num_experts: int, each: int, width: int, inner: int
) -> None:
    x, bias = place.random(tokens, width), place.random(num_experts, 2 * inner)
    experts = torch.stack([torch.randperm(num_experts)[:each] for _ in range(tokens)]).int()
    experts[tokens // 2 + 1 :] = num_experts  # as padding has
    there = (experts.flatten() < num_experts).to(place.device)
    w = weights(kind, num_experts, 2 * inner, width, place)
    roundings = {torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 3e-2}[place.dtype]
    sorted_tile = expert_tile(tokens * each, num_experts, w, deterministic=True)
    for tile in (expert_tile(1, num_experts, w), sorted_tile):  # alone, where the place knows that
        numbers = w if isinstance(w, Tensor) else unrounded(w) if tile == 1 else meant(w)
        exact = gated(exact_rows(x, numbers.view(num_experts, -1, width), experts, each), bias, experts)
        work = deal_out(experts.to(place.device), num_experts, tile)
        got = matmul_experts_gated(x, w, work, each, ClampedGate(bias, LIMIT, SLOPE))
        torch.testing.assert_close(got[there].double(), exact[there], rtol=roundings, atol=roundings)
    if place.device == "cuda" and not isinstance(w, Tensor):  # in plain order
        plain = meant(w).view(num_experts, -1, width)
        assert torch.equal(
            got[there], matmul_experts_gated(x, plain, work, each, ClampedGate(bias, LIMIT, SLOPE))[there]
        )


def gated(both: Tensor, bias: Tensor, experts: Tensor) -> Tensor:
    both = both + bias.double()[experts.flatten().clamp(max=len(bias) - 1).long()]
    gate, up = both[:, 0::2].clamp(max=LIMIT), both[:, 1::2].clamp(-LIMIT, LIMIT)
    assert (gate == LIMIT).any(), "limits have been met"
    assert (up.abs() == LIMIT).any()
    return (up + 1) * gate * torch.sigmoid(SLOPE * gate)


def test_bad_input() -> None:
    work, w = deal_out(torch.zeros(2, 1, dtype=torch.int32), 4, 16), torch.zeros(4, 8, 6)
    for bias, message in (
        (torch.zeros(4, 6), "bias: got shape [4, 6], wanted [4, 8]"),
        (torch.zeros(4, 8).half(), "bias: got torch.float16, wanted torch.float32"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            matmul_experts_gated(torch.zeros(2, 6), w, work, 1, ClampedGate(bias, 7.0, 1.7))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's own tests")
def test_interpreted() -> None:
    rerun_interpreted(__file__)
