"""Experts of the best groups alone: against a loop in Python, against transformers' routers."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from covering import long
from interpreted import rerun_interpreted
from places import PLACES, Place
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.route import route, route_reference

SIZES = [
    # Experts, how many of a token, groups, how many of these.
    (12, 4, 4, 2),
    (256, 8, 8, 4),
    long(160, 6, 8, 3),
    (30, 5, 5, 1),
    (14, 4, 7, 2),
    long(384, 8, 3, 2),
    long(9, 6, 3, 2),
    long(96, 16, 2, 1),
]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return Place.of(request)


def likeliest(choice: list[float], each: int, groups: int, best_groups: int, *, biased: bool) -> list[int]:
    """Of one token, by its numbers; of equals the first."""
    size = len(choice) // groups
    parts = [choice[group * size :][:size] for group in range(groups)]
    goodness = [sum(sorted(part, reverse=True)[: 1 + biased]) for part in parts]
    best = sorted(range(groups), key=lambda group: (-goodness[group], group))[:best_groups]
    there = [group * size + one for group in sorted(best) for one in range(size)]
    return sorted(there, key=lambda one: (-choice[one], one))[:each]


def scores_of(logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """As the kernel has them: what counts, and what is chosen by."""
    exact = logits.float()
    scores = exact.softmax(1) if bias is None else exact.sigmoid()
    return scores, scores if bias is None else scores + bias


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("num_experts", "each", "groups", "best_groups"), SIZES)
def test_route(
    place: Place, num_experts: int, each: int, groups: int, best_groups: int, biased: bool, normed: bool
) -> None:
    tokens, scale, shared = 13, 2.5, 1
    # Sixteenths: equals among them, and none that are almost equal, which a processor's own sigmoids would tell apart.
    logits = (place.random(tokens, num_experts) * 32).round() / 16
    logits[3] = 0.0
    # Not so large that it alone chooses, for all tokens the same: whose may lie in the best groups anyway.
    bias = (place.random(num_experts).float() * 2).round() / 16 if biased else None
    rows = place.ints([tokens - 2])
    more: dict[str, Any] = {"groups": groups, "best_groups": best_groups, "normed": normed, "bias_E": bias}
    more |= {"scale": scale, "shared": shared}
    experts, weights = route(logits, each, rows=rows, **more)
    scores, choice = scores_of(logits.cpu(), None if bias is None else bias.cpu())
    size, unlimited = num_experts // groups, route(logits, each, **{**more, "groups": 1, "best_groups": 1})[0]
    for token in range(tokens - 2):
        wanted = likeliest(choice[token].tolist(), each, groups, best_groups, biased=biased)
        assert len({one // size for one in wanted}) <= best_groups
        assert experts[token].tolist() == [*wanted, num_experts]
        counted = scores.double()[token, wanted]
        counted = counted / counted.sum() if normed else counted
        exact = torch.cat((counted * scale, torch.ones(1).double()))
        place.check_rounded(weights[token], exact.to(place.device))
    assert (experts[tokens - 2 :] == num_experts + shared).all()
    assert not torch.equal(experts[: tokens - 2], unlimited[: tokens - 2])
    again, _ = route(logits[:7], each, **more)
    assert torch.equal(again, experts[:7])


@pytest.mark.parametrize("biased", [True, False])
def test_all_groups_are_as_none(place: Place, biased: bool) -> None:
    logits, bias = place.random(7, 24), place.random(24).float() if biased else None
    wanted = route(logits, 5, normed=True, bias_E=bias)
    got = route(logits, 5, normed=True, bias_E=bias, groups=24, best_groups=24)
    assert all(map(torch.equal, got, wanted))


def test_none_is_of_another_group_while_one_is_left(place: Place) -> None:
    """Not even where shares are nothing, to the last bit."""
    logits = torch.full((2, 8), -1e4, device=place.device, dtype=place.dtype)
    logits[0, 5], logits[1, 0] = 1e4, 1e4
    experts, _ = route(logits, 2, normed=True, groups=4, best_groups=1)
    assert experts.tolist() == [[5, 4], [0, 1]]
    bias = torch.tensor([9.0, -9.0, 0, 0, 0, 0, 0, 0], device=place.device)
    experts, _ = route(logits, 4, normed=True, bias_E=bias, groups=4, best_groups=2)
    assert experts.tolist() == [[0, 5, 4, 1], [0, 2, 3, 1]]


@pytest.mark.parametrize("biased", [True, False])
def test_numbers_that_are_none_have_some_expert(place: Place, biased: bool) -> None:
    logits = place.random(4, 15)
    logits[0] = float("nan")
    logits[1, 2] = float("nan")
    logits[2, 5:10] = float("nan")
    bias = place.random(15).float() if biased else None
    experts, _ = route(logits, 4, normed=True, bias_E=bias, groups=5, best_groups=2)
    assert ((experts >= 0) & (experts < 15)).all()


def same_choice(got: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor, Tensor]) -> None:
    """Theirs are in no order."""
    (experts, weights), (_, their_weights, their_experts) = got, theirs
    order, their_order = experts.sort(1), their_experts.sort(1)
    assert torch.equal(order.values.long(), their_order.values)
    ours = weights.gather(1, order.indices)
    torch.testing.assert_close(ours, their_weights.gather(1, their_order.indices), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("run", [route, route_reference])
@pytest.mark.parametrize("normed", [True, False])
def test_as_deepseek_v3_has_it(run: Any, normed: bool) -> None:
    config = DeepseekV3Config(hidden_size=48, n_routed_experts=64, num_experts_per_tok=6, n_group=8, topk_group=3)
    config.norm_topk_prob = normed
    router = DeepseekV3TopkRouter(config)
    router.weight.data.normal_()
    router.e_score_correction_bias.uniform_(-0.3, 0.3)
    with torch.inference_mode():
        x = torch.randn(50, 48) * 0.3
        theirs = router(x)
        more: dict[str, Any] = {"normed": normed, "scale": config.routed_scaling_factor}
        ours = run(theirs[0], 6, bias_E=router.e_score_correction_bias, groups=8, best_groups=3, **more)
    same_choice(ours, theirs)


@pytest.mark.parametrize("run", [route, route_reference])
def test_as_deepseek_v2_has_it(run: Any) -> None:
    config = DeepseekV2Config(hidden_size=64, n_routed_experts=40, num_experts_per_tok=6, n_group=8, topk_group=3)
    config.topk_method, config.routed_scaling_factor = "group_limited_greedy", 16.0
    router = DeepseekV2TopkRouter(config)
    router.weight.data.normal_()
    with torch.inference_mode():
        x = torch.randn(50, 64) * 0.3
        theirs = router(x)
        same_choice(run(theirs[0], 6, normed=False, scale=16.0, groups=8, best_groups=3), theirs)


@pytest.mark.parametrize(
    ("each", "groups", "best_groups", "biased", "message"),
    [
        (2, 5, 2, False, "groups: got 5, wanted a divisor of 12, how many experts there are"),
        (2, 0, 1, False, "groups: got 0, wanted a divisor of 12"),
        (2, 4, 5, False, "best_groups: got 5, wanted 1 to 4, as many as there are"),
        (2, 4, 0, False, "best_groups: got 0, wanted 1 to 4"),
        (2, 12, 2, True, "groups: got 12 of 1 expert each, wanted two at least, whose sum is compared"),
        (7, 4, 2, False, "each: got 7, wanted 1 to 6, as many as 2 groups have"),
    ],
)
def test_bad_input(each: int, groups: int, best_groups: int, biased: bool, message: str) -> None:
    bias = torch.zeros(12) if biased else None
    with pytest.raises(ValueError, match=re.escape(message)):
        route(torch.zeros(3, 12), each, normed=True, bias_E=bias, groups=groups, best_groups=best_groups)


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_it_compiles_for_cards_that_are_not_here(capability: int) -> None:
    """DeepSeek V3's and V2's, with tokens that are padding."""
    rows = torch.empty(1, dtype=torch.int32, device="meta")
    with compiling_for(capability) as kernels:
        logits, bias = torch.empty(7, 256, device="meta"), torch.empty(256, device="meta")
        route(logits, 8, normed=True, bias_E=bias, scale=2.5, shared=1, groups=8, best_groups=4, rows=rows)
        logits = torch.empty(7, 160, dtype=torch.bfloat16, device="meta")
        route(logits, 6, normed=False, scale=16.0, shared=2, groups=8, best_groups=3, rows=rows)
    assert len(kernels) == 2
    for kernel in kernels:
        assert kernel.asm["cubin"]
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (capability == 90)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's own tests")
def test_interpreted() -> None:
    rerun_interpreted(__file__)
