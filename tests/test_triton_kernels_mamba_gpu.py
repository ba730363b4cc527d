"""On a GPU: Mamba-2 layers against float64, token by token, over NaN where nothing is; a token's own bits."""

import pytest
import torch

from carried_layers import check_bits_however_cut
from mamba_layers import MambaLayer
from tercet.triton_kernels.gated_group_norm import gated_group_norm, gated_squares
from tercet.triton_kernels.relu_squared import relu_squared
from test_triton_kernels_delta_gpu import NEAR, assert_near, check_on_card
from tried_layers import TriedLayers, plain_steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = [(1, 48, 128, 64), (8, 64, 128, 64), (1, 128, 128, 64), (8, 16, 128, 80), (1, 24, 256, 128)]
"""Key and value heads, their numbers."""
TIMES = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 8}
"""Log decays of a tile add up to hundreds where time steps are large, and so is what those tokens add: in fp32 the
difference of two such sums errs by 3e-5."""
NAN = float("nan")


def on_card(K: int, H: int, D: int, V: int, dtype: torch.dtype = torch.bfloat16) -> MambaLayer:
    return MambaLayer(K, H, D, V, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("K", "H", "D", "V"), SIZES)
def test_step(K: int, H: int, D: int, V: int, dtype: torch.dtype) -> None:
    layer = on_card(K, H, D, V, dtype)
    rows = [(slot, length) for slot, length in enumerate([5, 1, 0, 700, 2, 1])]
    for chunks, padding in (
        ([(6, 0, 700), (7, 64, 65), (9, 0, 0), (8, 128, 1), (10, 0, 200)], 77),
        ([(7, 64, 7)], 9),
        ([], 0),
    ):
        check_on_card(layer, rows, chunks, padding, TIMES[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("K", "H", "D", "V"), SIZES)
def test_bits_of_a_prompt_however_it_is_cut(K: int, H: int, D: int, V: int, dtype: torch.dtype) -> None:
    cases = [([1400], False), ([64, 1280, 56], True), ([128, 1272], False)]
    check_bits_however_cut(on_card(K, H, D, V, dtype), cases, ahead=700)


@pytest.mark.parametrize(("K", "H", "D", "V"), SIZES)
def test_tokens_that_are_tried_have_the_bits_of_plain_steps(K: int, H: int, D: int, V: int) -> None:
    slots, kept = [(3, 70, 5), (0, 1, 5), (6, 0, 0), (5, 2, 1)], [5, 2, 0, 0]
    run = TriedLayers([on_card(K, H, D, V) for _ in range(2)], 9, slots, 5)
    old_tails, old_states = run.states.tails_LSTC.clone(), run.states.states_LSHDV.clone()
    outs = run.run()
    run.settle(kept, 7)
    for index, layer in enumerate(run.layers):
        for row, ((slot, length, count), held) in enumerate(zip(slots, kept, strict=True)):
            x, first = run.of_slot(index, row), row * 5
            pair = old_tails[index].clone(), old_states[index].clone()
            found = plain_steps(layer, x[:held], *pair, slot, length)
            beyond = pair[0].clone(), pair[1].clone()
            found = torch.cat((found, plain_steps(layer, x[held:], *beyond, slot, length + held)))
            assert torch.equal(found, outs[index][first : first + count])
            for ours, theirs in zip((run.states.tails_LSTC, run.states.states_LSHDV), pair, strict=True):
                assert torch.equal(ours[index, slot].nan_to_num(7), theirs[slot].nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("groups", "size"), [(1, 3072), (1, 8192), (8, 512)])
def test_norm(groups: int, size: int, dtype: torch.dtype) -> None:
    T, X, first = 37, groups * size, 256
    x, z = torch.randn(T, X, device="cuda").to(dtype), torch.randn(T, X + first, device="cuda").to(dtype)
    weight, gates = torch.rand(X, device="cuda") + 0.5, z[:, first:].double()
    gated = x.double() * gates * gates.sigmoid()
    parts = gated.unflatten(1, (groups, size))
    wanted = (parts / (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1) * weight
    assert_near(gated_group_norm(x, z, first, weight, groups, 1e-5, rows=None), wanted, dtype)
    if groups == 1:
        half = X // 2
        own = [(x[:, at : at + half].contiguous(), z, first + at) for at in (0, half)]
        squares = torch.stack([gated_squares(*one, rows=None) for one in own])
        for at, one in zip((0, half), own, strict=True):
            got = gated_group_norm(*one, weight[at : at + half], 1, 1e-5, rows=None, squares_PT1=squares)
            assert_near(got, wanted[:, at : at + half], dtype)
    assert NEAR[dtype] > (relu_squared(x).double() - x.double().relu().square()).abs().max() / 32
