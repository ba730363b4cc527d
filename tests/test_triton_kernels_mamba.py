"""Mamba-2 layers against the rule written out token by token in float64, over NaN where nothing is, and their bits.

The references here, against transformers too; the kernels in Triton's interpreter, by running this file once more.
"""

import pytest
import torch
from torch import Tensor

from carried_layers import check_bits_however_cut, check_step
from covering import long
from interpreted import rerun_interpreted
from mamba_layers import MambaLayer
from tercet.triton_kernels.delta_decode import delta_decode
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.gated_group_norm import gated_group_norm, gated_squares
from tercet.triton_kernels.mamba_prefill import mamba_prefill
from tercet.triton_kernels.mamba_prologue import mamba_prologue

NEAR = {"rtol": 1e-4, "atol": 2e-5}
NAN = float("nan")
SIZES = ("K", "H", "D", "V", "W")
"""Key and value heads, their numbers, taps."""
CASES = [(2, 4, 32, 48, 4), long(1, 3, 16, 64, 2), long(3, 3, 256, 32, 8)]
SLOTS = 12

Step = tuple[list[tuple[int, int]], list[tuple[int, int, int]]]
STEPS: list[Step] = [
    ([(3, 5), (11, 0), (0, 1), (7, 2), (10, 80)], [(5, 0, 5), (11, 0, 0), (1, 64, 70), (2, 0, 64), (9, 128, 2)]),
    ([(4, 1)], []),
    ([], [(6, 64, 1), (8, 0, 3), (11, 0, 0)]),
    ([(99, 3), (-1, 2)], [(-1, 0, 2), (SLOTS, 64, 3)]),  # outside
]


def near(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted.float(), **NEAR)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(SIZES, CASES)
def test_step(K: int, H: int, D: int, V: int, W: int, step: Step) -> None:
    rows, chunks = step
    layer = MambaLayer(K, H, D, V, W, time_steps=(0.05, 1.0) if rows and chunks else (0.0, float("inf")))
    check_step(layer, SLOTS, rows, chunks, 3, near, near)


@pytest.mark.parametrize("dtype", [torch.float32, long(torch.float16)])
def test_bits_of_a_prompt_however_it_is_cut(dtype: torch.dtype) -> None:
    cases = [([200], False), ([64, 128, 8], True), ([128, 72], False)]
    check_bits_however_cut(MambaLayer(1, 2, 16, 32, dtype=dtype), cases, ahead=7)


def test_a_state_that_hardly_fades_and_one_that_is_gone_at_once() -> None:
    """Over many tiles; of log decays that add up to thousands, nothing is not a number."""
    layer = MambaLayer(1, 2, 16, 16)
    layer.a_log = torch.tensor([-9.0, 5.0])
    layer.dt_bias = torch.tensor([1.0, 3.0])
    x, (tails, states) = layer.tokens(330), layer.pools(1)
    out = layer.run(x, tails, states, [], [(0, 0, 330)])
    wanted, _, wanted_state = layer.exact(x, None, None)
    torch.testing.assert_close(out, wanted.float(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(states[0], wanted_state.float(), rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(INTERPRETED, reason="of the references")
def test_as_transformers() -> None:
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated

    norm = GraniteMoeHybridRMSNormGated(96, 32, 0.1)
    torch.nn.init.uniform_(norm.weight)
    x, z = torch.randn(5, 96), torch.randn(5, 100)
    got = gated_group_norm(x, z, 3, norm.weight.detach(), 3, 0.1, rows=None)
    torch.testing.assert_close(got, norm(x, z[:, 3:99]).detach(), **NEAR)


@pytest.mark.parametrize(("groups", "size"), [(3, 48), long(1, 5000)])
@pytest.mark.parametrize("wide", [False, True])
def test_groups(groups: int, size: int, wide: bool) -> None:
    """`wide`: the weight in fp32 where the rest is not. One group of several ranks, too."""
    dtype = torch.float16 if wide else torch.float32
    near = {"rtol": 2e-3, "atol": 2e-3} if wide else NEAR
    T, first, X = 4, 7, groups * size
    x, z = torch.randn(T + 1, X).to(dtype), torch.randn(T + 1, X + 12).to(dtype)
    weight, rows = torch.rand(X) + 0.5, torch.tensor([T], dtype=torch.int32)
    gates = z[:, first : first + X].double()
    gated = x.double() * gates * gates.sigmoid()

    def normed(y: torch.Tensor) -> torch.Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 0.1).sqrt()

    wanted = normed(gated.unflatten(1, (groups, size))).flatten(1) * weight
    got = gated_group_norm(x, z, first, weight, groups, 0.1, rows=rows)
    torch.testing.assert_close(got[:T], wanted.to(dtype)[:T], **near)
    half, parts = X // 2, []
    for start in (0, half):
        own = x[:, start : start + half].contiguous(), z, first + start
        parts.append((own, gated_squares(*own, rows=rows)))
    squares = torch.stack([part for _, part in parts])
    whole = [
        gated_group_norm(*own, weight[start : start + half], 1, 0.1, rows=rows, squares_PT1=squares)
        for start, (own, _) in zip((0, half), parts, strict=True)
    ]
    torch.testing.assert_close(torch.cat(whole, 1)[:T], (normed(gated) * weight).to(dtype)[:T], **near)


def test_bad_input() -> None:
    layer = MambaLayer(2, 4, 32, 16)
    tails, states = layer.pools(3)
    x, ints, none = layer.tokens(2), layer.ints, layer.ints()
    weights = tails, layer.conv, layer.bias, layer.a_log, layer.dt_bias
    how = {"time_steps": (0.0, 1.0), "rows": None}
    step = none, none, ints(0), ints(0), ints(0, 2)
    with pytest.raises(ValueError, match="x: got 195 numbers of a token, wanted 192 channels, gates and 4 time steps"):
        mamba_prologue(x[:, :195].contiguous(), *weights, *step, **how)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"conv_bias: got shape \[191\], wanted \[192\]"):
        mamba_prologue(x, tails, layer.conv, layer.bias[1:], *weights[3:], *step, **how)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x: got 2 tokens, wanted one for each of 3 decode rows"):
        mamba_prologue(x, *weights, ints(0, 1, 2), ints(1, 1, 1), *step[2:], **how)  # type: ignore[arg-type]
    qkv, gates, out = layer.random(2, layer.channels), torch.zeros(2, 8), layer.random(2, 4, 16)
    with pytest.raises(ValueError, match=r"skip: got shape \[3\], wanted \[4\]"):
        delta_decode(
            qkv, gates, states, ints(0, 1), ints(2, 2), num_key_heads=2, out_BHV=out, skip_H=layer.skip[1:]
        )  # fmt: skip
    with pytest.raises(ValueError, match="heads of values: got 8 numbers, wanted a multiple of 16"):
        mamba_prefill(
            qkv, gates, layer.skip, states[..., :8].contiguous(), ints(0), ints(0), ints(0, 2),
            num_key_heads=2, out_THV=out,
        )  # fmt: skip
    with pytest.raises(ValueError, match="num_groups: got 3, wanted a divisor of 64"):
        gated_group_norm(out.flatten(1), x, 192, torch.ones(64), 3, 1e-6, rows=None)


def test_with_kernels() -> None:
    rerun_interpreted(__file__)
