"""Experts, from their choice to their sum, against float64: in the interpreter, on a GPU, by references.

Nothing is where no pair is: tables and rows begin as what must not be read.
"""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from covering import long
from interpreted import rerun_interpreted
from places import PLACES, Place
from tercet.triton_kernels.clamped_gate import ClampedGate
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.expert_work import ExpertWork, deal_out, deal_out_reference, most_tiles
from tercet.triton_kernels.matmul_experts import expert_tile, matmul_experts, matmul_experts_gated
from tercet.triton_kernels.route import route
from tercet.triton_kernels.sum_experts import sum_experts

HAVE_GPU = torch.cuda.is_available()


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return Place.of(request)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("num_experts", "each"), [(8, 2), (5, 5), (128, 8), (3, 1), long(60, 4)])
def test_route(place: Place, num_experts: int, each: int, normed: bool) -> None:
    tokens = 37
    logits = place.random(tokens, num_experts) * 3
    logits[5] = logits[5, 0]  # all alike: the first few
    logits[6, -1] = logits[6].max() + 1
    rows = place.ints([tokens - 4])
    experts, weights = route(logits, each, normed=normed, rows=rows)
    shares = logits.double().softmax(1)
    for token in range(tokens - 4):
        wanted = sorted(range(num_experts), key=lambda one, t=token: (-float(logits[t, one]), one))[:each]
        assert experts[token].tolist() == wanted
        exact = shares[token, wanted]
        place.check_rounded(weights[token], exact / exact.sum() if normed else exact)
    assert (experts[tokens - 4 :] == num_experts).all()
    again, _ = route(logits[:9], each, normed=normed)
    assert torch.equal(again, experts[:9])


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("num_experts", "each", "shared", "biased", "shares", "gated"),
    [
        (6, 3, 2, True, False, False),
        (60, 4, 4, False, False, True),
        (128, 8, 1, True, False, False),
        (5, 2, 1, True, False, True),
        (9, 4, 0, True, False, False),
        (64, 6, 2, True, True, False),
    ],
)
def test_route_with_a_bias_and_with_experts_that_all_share(
    place: Place, num_experts: int, each: int, shared: int, biased: bool, shares: bool, gated: bool, normed: bool
) -> None:
    """The bias decides who is chosen, and not how much they count; who is shared has no part in either."""
    tokens, scale = 23, 1.7
    logits = place.random(tokens, num_experts + gated) * 3
    bias = (place.random(num_experts).float() * 0.4).contiguous() if biased else None
    rows = place.ints([tokens - 2])
    more = {"normed": normed, "bias_E": bias, "shares": shares, "scale": scale, "shared": shared, "gated": gated}
    experts, weights = route(logits, each, rows=rows, **more)
    assert experts.shape == weights.shape == (tokens, each + shared)
    exact = logits.double()
    scores = exact[:, :num_experts].sigmoid() if biased and not shares else exact[:, :num_experts].softmax(1)
    choice = scores if bias is None else scores + bias.double()
    otherwise = 0
    for token in range(tokens - 2):
        wanted, unbiased = (
            sorted(range(num_experts), key=lambda one, row=by[token]: (-float(row[one]), one))[:each]  # type: ignore[misc]
            for by in (choice, scores)
        )
        assert experts[token].tolist() == [*wanted, *range(num_experts, num_experts + shared)]
        otherwise += set(wanted) != set(unbiased)
        counted = scores[token, wanted]
        counted = counted / counted.sum() if normed else counted
        own = exact[token, -1].sigmoid() if gated else exact.new_tensor(1.0)
        place.check_rounded(weights[token], torch.cat((counted * scale, own.expand(shared))))
    assert bool(otherwise) == biased
    assert (experts[tokens - 2 :] == num_experts + shared).all()
    again, _ = route(logits[:9], each, **more)
    assert torch.equal(again, experts[:9])
    if not gated:
        first = logits * 0.75  # both are exact
        again, counts = route(torch.cat((first, logits - first), 1), each, rows=rows, paired=True, **more)
        assert torch.equal(again, experts)
        torch.testing.assert_close(counts, weights, rtol=1e-6 if logits.dtype == torch.float32 else 2e-2, atol=0)


def test_experts_may_have_scales(place: Place) -> None:
    logits, scales = place.random(9, 12), torch.rand(12, device=place.device) + 0.5
    chosen, weights = route(logits, 3, normed=True)
    again, scaled = route(logits, 3, normed=True, scales_E=scales)
    assert torch.equal(chosen, again)
    near = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[logits.dtype]
    torch.testing.assert_close(scaled.float(), weights.float() * scales[chosen.long()], rtol=near, atol=near)


def test_numbers_that_are_none_have_some_expert(place: Place) -> None:
    logits = place.random(3, 6)
    logits[0] = float("nan")
    logits[1, 2] = float("nan")
    experts, _ = route(logits, 2, normed=True)
    assert ((experts >= 0) & (experts < 6)).all()


def same_work(got: ExpertWork, wanted: ExpertWork) -> None:
    assert torch.equal(got.experts_N.cpu(), wanted.experts_N)
    used = wanted.experts_N >= 0
    assert got.pairs_Q is not None
    assert wanted.pairs_Q is not None
    assert torch.equal(got.pairs_Q.cpu().view(-1, got.tile)[used], wanted.pairs_Q.view(-1, wanted.tile)[used])


@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "each"),
    [(1, 8, 2), (3, 128, 8), long(6, 128, 8), (40, 5, 3), (75, 257, 9), long(300, 60, 4), (700, 16, 4)]
    + ([(64, 512, 11), (113, 257, 9), (114, 257, 9), (8192, 257, 9), (3000, 3, 2)] if HAVE_GPU else []),
)
def test_pairs_are_dealt_out(place: Place, tokens: int, num_experts: int, each: int, tile: int) -> None:
    some = torch.randint(0, num_experts + 1, (tokens, each)).int()  # with experts that nobody is
    for experts in (some, torch.full_like(some, num_experts - 1), torch.full_like(some, num_experts)):
        got = deal_out(experts.to(place.device), num_experts, tile)
        same_work(got, deal_out_reference(experts, num_experts, tile))
        assert len(got.experts_N) == most_tiles(experts.numel(), num_experts, tile)
    flat = some.flatten().tolist()
    work = deal_out_reference(some, num_experts, tile)
    assert work.pairs_Q is not None
    dealt = [
        (expert, pair)
        for expert, pairs in zip(work.experts_N.tolist(), work.pairs_Q.view(-1, tile).tolist(), strict=True)
        for pair in pairs
        if pair >= 0 and expert >= 0
    ]
    wanted = [(expert, pair) for pair, expert in enumerate(flat) if expert < num_experts]
    assert dealt == (wanted if 4 * len(flat) <= num_experts else sorted(wanted))


def exact_rows(x: Tensor, w: Tensor, experts: Tensor, per_row: int) -> Tensor:
    """Of each pair its row times its expert's weights, in float64; NaN where it has none."""
    rows = [
        w[expert].double() @ x[pair // per_row].double() if expert < len(w) else x.new_full((w.shape[1],), torch.nan)
        for pair, expert in enumerate(experts.flatten().tolist())
    ]
    return torch.stack([row.double() for row in rows])


@pytest.mark.parametrize(
    ("tokens", "num_experts", "each", "width", "inner"),
    [(1, 8, 2, 64, 48), (7, 4, 2, 40, 24), long(33, 6, 3, 96, 40)]
    + ([(64, 128, 8, 2048, 768), (700, 8, 2, 1024, 1000), (2000, 16, 4, 512, 256)] if HAVE_GPU else [])
    + ([(4200, 8, 1, 320, 192)] if HAVE_GPU else []),
)
def test_products(place: Place, tokens: int, num_experts: int, each: int, width: int, inner: int) -> None:
    x = place.random(tokens, width)
    experts = torch.stack([torch.randperm(num_experts)[:each] for _ in range(tokens)]).int()
    experts[tokens // 2 + 1 :] = num_experts  # as padding has
    gate_up = place.random(num_experts, 2 * inner, width) * width**-0.5
    down = place.random(num_experts, width, inner) * inner**-0.5
    there = (experts.flatten() < num_experts).to(place.device)
    both = exact_rows(x, gate_up, experts, each)
    roundings = 1e-5 if place.dtype == torch.float32 else 6e-3 if place.dtype == torch.float16 else 3e-2
    for tile in (1, expert_tile(tokens * each, num_experts, gate_up, deterministic=True)):
        work = deal_out(experts.to(place.device), num_experts, tile)
        gated = matmul_experts_gated(x, gate_up, work, each)
        exact = torch.nn.functional.silu(both[:, 0::2]) * both[:, 1::2]
        torch.testing.assert_close(gated[there].double(), exact[there], rtol=roundings, atol=roundings)
        curved = matmul_experts_gated(x, gate_up, work, each, gelu=True)
        exact = torch.nn.functional.gelu(both[:, 0::2], approximate="tanh") * both[:, 1::2]
        torch.testing.assert_close(curved[there].double(), exact[there], rtol=roundings, atol=roundings)
        squared = matmul_experts(x, gate_up, work, squared_each=each)
        torch.testing.assert_close(
            squared[there].double(), both[there].relu().square(), rtol=roundings, atol=roundings
        )  # fmt: skip
        given = torch.where(there[:, None], gated, float("nan"))
        projected = matmul_experts(given, down, work)
        exact = exact_rows(given, down, experts, 1)
        torch.testing.assert_close(projected[there].double(), exact[there], rtol=roundings, atol=roundings)
    alone = experts[:1].clone()
    work = deal_out(alone.to(place.device), num_experts, 64)  # other tiles, other neighbours
    assert place.device == "cpu" or torch.equal(matmul_experts_gated(x[:1], gate_up, work, each), gated[:each])


@pytest.mark.parametrize(("tokens", "each", "width"), [(1, 1, 64), (9, 8, 1000), (5, 3, 2048)])
def test_sums(place: Place, tokens: int, each: int, width: int) -> None:
    x, weights = place.random(tokens * each, width), place.random(tokens, each).abs()
    exact = (x.double().view(tokens, each, width) * weights.double()[:, :, None]).sum(1)
    place.check_rounded(sum_experts(x, weights), exact)
    count = max(1, tokens - 2)
    place.check_rounded(sum_experts(x, weights, place.ints([count]))[:count], exact[:count])
    wide = torch.rand(tokens, each, device=place.device)
    exact = (x.double().view(tokens, each, width) * wide.double()[:, :, None]).sum(1)
    place.check_rounded(sum_experts(x, wide), exact)


def test_what_experts_add_to_their_pairs(place: Place) -> None:
    tokens, each, width, num_experts = 7, 3, 1030, 5
    x, weights = place.random(tokens * each, width), place.random(tokens, each).abs()
    experts, bias = torch.randint(num_experts, (tokens, each)).int(), place.random(num_experts, width)
    exact = x.double().view(tokens, each, width) + bias[experts.long()].double()
    exact = (exact * weights.double()[:, :, None]).sum(1)
    got = sum_experts(x, weights, experts_TK=experts.to(place.device), bias_ED=bias)
    place.check_rounded(got, exact)
    experts[-1] = num_experts  # as padding has: nothing is read for them
    assert torch.equal(sum_experts(x, weights, None, experts.to(place.device), bias)[:-1], got[:-1])


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: route(torch.zeros(3, 4), 5, normed=True), "each: got 5, wanted 1 to 4"),
        (lambda: route(torch.zeros(3, 4).double(), 2, normed=True), "logits: got torch.float64, wanted"),
        (lambda: route(torch.zeros(3, 4), 2, normed=True, gated=True), "shared: got 0, wanted at least 1"),
        (lambda: route(torch.zeros(3, 4), 2, normed=True, bias_E=torch.zeros(3)), "bias: got shape [3], wanted [4]"),
        (
            lambda: route(torch.zeros(3, 4), 2, normed=True, bias_E=torch.zeros(4).half()),
            "bias: got torch.float16, wanted torch.float32",
        ),
        (lambda: route(torch.zeros(3, 5), 2, normed=True, paired=True), "logits: got 5 of a token, wanted pairs"),
        (lambda: deal_out(torch.zeros(3, 2), 4, 16), "experts: got torch.float32, wanted torch.int32"),
        (lambda: _multiply(w=torch.zeros(3, 8, 5)), "w: got shape [3, 8, 5], wanted [4, *, 6]"),
        (lambda: _multiply(w=torch.zeros(4, 7, 6)), "w: got 7 rows, wanted gate and up rows in turns"),
        (lambda: _multiply(w=torch.zeros(4, 8, 6).half()), "w: got torch.float16, wanted torch.float32"),
        (lambda: sum_experts(torch.zeros(5, 8), torch.zeros(2, 2)), "x: got shape [5, 8], wanted [4, *]"),
        (lambda: sum_experts(torch.zeros(4, 8), torch.zeros(2, 2).half()), "weights: got torch.float16, wanted"),
        (
            lambda: sum_experts(torch.zeros(4, 8), torch.zeros(2, 2), bias_ED=torch.zeros(3, 8)),
            "experts: got none, wanted those whose biases are added",
        ),
    ],
)  # fmt: skip
def test_bad_input(run: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run()


def _multiply(w: Tensor) -> Tensor:
    work = deal_out(torch.zeros(2, 1, dtype=torch.int32), 4, 16)
    return matmul_experts_gated(torch.zeros(2, 6), w, work, 1)


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", [long(80), 89, 90])
def test_they_compile_for_cards_that_are_not_here(capability: int) -> None:
    """Every size of tiles, few pairs and many, and so many that Hopper has a kernel for them; each waits for the kernel
    ahead of it."""

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    rows, names = meta(1, dtype=torch.int32), set()
    for tokens, tile in ((1, 1), (1, 16), (256, 32), (512, 64), (2048, 128), (8192, 128)):
        with compiling_for(capability) as kernels:
            experts, weights = route(meta(tokens, 128), 8, normed=True, rows=rows)
            gate_up = meta(128, 1536, 2048)
            assert tile == 1 or expert_tile(tokens * 8, 128, gate_up, deterministic=True) == tile
            assert (expert_tile(tokens * 8, 128, gate_up) == 1) == (tokens == 1)
            assert expert_tile(tokens * 8, 128, gate_up, again=2) > 1
            work = deal_out(experts, 128, tile)
            gated = matmul_experts_gated(meta(tokens, 2048), gate_up, work, 8)
            sum_experts(matmul_experts(gated, meta(128, 2048, 768), work), weights, rows)
            matmul_experts(meta(tokens, 2048), meta(128, 768, 2048), work, squared_each=8)
            biased = {"bias_E": meta(128, dtype=torch.float32), "scale": 1.5, "shared": 2}
            logits = meta(tokens, 128, dtype=torch.float32)
            _, wide = route(logits, 8, normed=True, rows=rows, **biased)  # type: ignore[arg-type]
            for shares in (False, True):
                pairs = meta(tokens, 256, dtype=torch.float32)
                route(pairs, 8, normed=True, paired=True, shares=shares, **biased)  # type: ignore[arg-type]
            sum_experts(meta(tokens * 10, 2048), wide, rows)
            biases = meta(128, 2048)
            sum_experts(meta(tokens * 8, 2048), weights, rows, experts, biases)
            matmul_experts_gated(meta(tokens, 2048), gate_up, work, 8, ClampedGate(meta(128, 1536), 7.0, 1.702))
            route(meta(tokens, 61), 4, normed=False, shared=4, gated=True)
            matmul_experts_gated(meta(tokens, 2048), gate_up, work, 8, gelu=True)
            route(meta(tokens, 128), 8, normed=True, rows=rows, scales_E=meta(128, dtype=torch.float32))
        for kernel in kernels:
            assert kernel.asm["cubin"]
            assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (capability == 90)
        names |= {kernel.name for kernel in kernels}
    assert len(names) == 8 + (capability == 90)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's own tests")
def test_interpreted() -> None:
    rerun_interpreted(__file__)
