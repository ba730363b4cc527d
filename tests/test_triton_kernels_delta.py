"""Gated delta layers against the rule written out token by token in float64, over NaN where nothing is, and their bits.

The references here, against transformers too; the kernels in Triton's interpreter, by running this file once more.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from carried_layers import check_bits_however_cut, check_step
from covering import long
from delta_layers import DeltaLayer
from interpreted import rerun_interpreted
from mamba_layers import MambaLayer
from tercet.triton_kernels.copy_places import copy_places
from tercet.triton_kernels.delta_decode import delta_decode
from tercet.triton_kernels.delta_prefill import delta_prefill
from tercet.triton_kernels.delta_prologue import delta_prologue
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.gated_head_norm import gated_head_norm
from tercet.triton_kernels.sigmoid_gate import gate_by_sigmoid

NEAR = {"rtol": 1e-4, "atol": 1e-5}
NAN = float("nan")
SIZES = ("K", "H", "D", "V", "W")
"""Key and value heads, their numbers, taps."""
CASES = [(2, 4, 32, 16, 4), long(1, 3, 16, 64, 2), long(3, 3, 64, 32, 8)]
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
    layer, (rows, chunks) = DeltaLayer(K, H, D, V, W), step
    layer.rates_apart = not (rows and chunks)
    check_step(layer, SLOTS, rows, chunks, 3, near, near)


@pytest.mark.parametrize("dtype", [torch.float32, long(torch.float16)])
def test_bits_of_a_prompt_however_it_is_cut(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.triton_kernels.delta_prologue._MANY_TOKENS", 100)
    cases = [([200], False), ([64, 128, 8], True), ([128, 72], False)]
    check_bits_however_cut(DeltaLayer(1, 2, 16, 32, dtype=dtype), cases, ahead=7)


@pytest.mark.parametrize("kind", [DeltaLayer, MambaLayer])
def test_states_in_16_bits(kind: type[DeltaLayer] | type[MambaLayer]) -> None:
    """Rounded where they are kept, and nowhere else."""
    layer, prompt = kind(1, 2, 16, 32), 130
    x = layer.tokens(prompt + 20)
    tails, states = layer.pools(3)
    rounded_tails, rounded = layer.pools(3, torch.float16)
    for pool in (tails, states, rounded_tails, rounded):
        pool[1] = NAN
    whole = layer.run(x[:prompt], tails, states, [], [(1, 0, prompt)])
    assert torch.equal(layer.run(x[:prompt], rounded_tails, rounded, [], [(1, 0, prompt)]), whole)
    assert torch.equal(rounded[1], states[1].half())
    for at in range(prompt, len(x)):
        kept = rounded[1].float()
        (out,) = layer.run(x[at : at + 1], rounded_tails, rounded, [(1, at + 1)], [])
        again = torch.stack([kept] * 3)
        (wanted,) = layer.run(x[at : at + 1], tails, again, [(1, at + 1)], [])
        assert torch.equal(out, wanted)
        assert torch.equal(rounded[1], again[1].half())
    # A prompt that is cut goes on from what was kept.
    cut, start = rounded[1].float(), 64
    again = torch.stack([cut] * 3)
    ends = [layer.run(x[:7], tails.clone(), pool, [], [(1, start, 7)]) for pool in (rounded, again)]
    assert torch.equal(*ends)


def test_keys_that_are_all_alike() -> None:
    """What a tile's tokens add, nothing decays, and each replaces what the last one said: no digit is lost."""
    K, H, D, V, T = 1, 2, 16, 16, 70
    qkv = torch.randn(T, 2 * D + H * V)
    qkv[:, : 2 * D] = F.normalize(torch.randn(2, D), dim=1).flatten()
    gates = torch.cat((torch.zeros(T, H), torch.ones(T, H)), 1)
    states, out = torch.full((1, H, D, V), NAN), torch.full((T, H, V), NAN)
    ints = [torch.tensor(numbers, dtype=torch.int32) for numbers in ([0], [0], [0, T])]
    delta_prefill(qkv, gates, states, *ints, num_key_heads=K, out_THV=out)
    q, k, v = qkv[0, :D], qkv[0, D : 2 * D], qkv[:, 2 * D :].view(T, H, V)
    torch.testing.assert_close(out, v * (q @ k), **NEAR)
    torch.testing.assert_close(states[0], k[None, :, None] * v[-1][:, None], **NEAR)


@pytest.mark.skipif(INTERPRETED, reason="of the references")
def test_as_transformers() -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    layer, T = DeltaLayer(2, 4, 32, 16), 150
    x = layer.tokens(T)
    K, H, D, V, C = layer.K, layer.H, layer.D, layer.V, layer.channels
    tails, states = layer.pools(1)
    got = [layer.run(x[:140], tails, states, [], [(0, 0, 140)])]
    got += [layer.run(x[token : token + 1], tails, states, [(0, token + 1)], []) for token in range(140, T)]
    convolved = theirs.causal_conv1d_fn(x[:, :C].T[None], layer.conv, activation="silu")[0].T
    q, k, v = convolved.split((K * D, K * D, H * V), 1)
    b, a = x[:, C + H * V :].chunk(2, 1)
    log_decay = -layer.a_log.exp() * F.softplus(a + layer.dt_bias)
    heads = q.reshape(1, T, K, D), k.reshape(1, T, K, D), v.reshape(1, T, H, V), log_decay[None], b.sigmoid()[None]
    for rule in (theirs.torch_chunk_gated_delta_rule, theirs.torch_recurrent_gated_delta_rule):
        out, state = rule(*heads, output_final_state=True, use_qk_l2norm_in_kernel=True)
        torch.testing.assert_close(torch.cat(got), out[0], **NEAR)
        torch.testing.assert_close(states, state, **NEAR)
    norm = theirs.Qwen3_5RMSNormGated(V, 0.1)
    torch.nn.init.uniform_(norm.weight)
    gates = x[:, C : C + H * V].reshape(-1, V)
    normed = gated_head_norm(torch.cat(got), x, C, norm.weight.detach(), 0.1, rows=None)
    torch.testing.assert_close(normed, norm(torch.cat(got).view(-1, V), gates).detach().view(T, -1), **NEAR)


@pytest.mark.parametrize(("H", "V"), [(3, 32), long(20, 128)])
@pytest.mark.parametrize("wide", [False, True])
def test_gates(H: int, V: int, wide: bool) -> None:
    """`wide`: the weight in fp32 where the rest is not."""
    dtype = torch.float16 if wide else torch.float32
    near = {"rtol": 2e-3, "atol": 2e-3} if wide else NEAR
    T, first = 4, 7
    x, z = torch.randn(T + 1, H, V).to(dtype), torch.randn(T + 1, H * V + 12).to(dtype)
    weight = torch.rand(V) + 0.5
    rows = torch.tensor([T], dtype=torch.int32)
    gates = z[:, first : first + H * V].double()
    got = gated_head_norm(x, z, first, weight, 0.1, rows=rows)
    wide_x = x.double()
    normed = wide_x / (wide_x.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight
    wanted = (normed.flatten(1) * gates * gates.sigmoid()).to(dtype)
    torch.testing.assert_close(got[:T], wanted[:T], **near)
    flat = x.flatten(1).clone()
    gate_by_sigmoid(flat, z, first, rows=rows)
    torch.testing.assert_close(flat[:T], (wide_x.flatten(1) * gates.sigmoid()).to(dtype)[:T], **near)


@pytest.mark.parametrize("shape", [(3, 16), long((4, 5000))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_places(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pools = torch.randn(2, 6, *shape).to(dtype)
    old, pairs = pools.clone(), [(1, 4), (-1, -1), (1, 0), (2, 6), (-1, 3), (3, 5)]
    copy_places(pools, torch.tensor(pairs, dtype=torch.int32))
    copy_places(pools, torch.empty(0, 2, dtype=torch.int32))
    for source, target in ((1, 4), (1, 0), (3, 5), (1, 1), (2, 2), (3, 3)):
        assert torch.equal(pools[:, target], old[:, source])


def test_bad_input() -> None:
    layer = DeltaLayer(2, 4, 32, 16)
    tails, states = layer.pools(3)
    x, ints, none = layer.tokens(2), layer.ints, layer.ints()
    weights = tails, layer.conv, layer.a_log, layer.dt_bias
    how = {"num_key_heads": 2, "key_dim": 32, "rows": None}
    step = none, none, ints(0), ints(0), ints(0, 2)
    with pytest.raises(ValueError, match=r"x: got shape \[2, 263\], wanted \[\*, 264\]"):
        delta_prologue(x[:, 1:].contiguous(), *weights, *step, **how)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"conv: got 1 taps, wanted 2 to 8"):
        delta_prologue(x, tails, layer.conv[:, :1].contiguous(), *weights[2:], *step, **how)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="conv: got 192 channels, wanted twice 3 key heads of 32 and 4 value heads"):
        delta_prologue(x, *weights, *step, **{**how, "num_key_heads": 3})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x: got 2 tokens, wanted one for each of 3 decode rows"):
        delta_prologue(x, *weights, ints(0, 1, 2), ints(1, 1, 1), *step[2:], **how)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"query_starts: got shape \[1\], wanted \[2\]"):
        delta_prologue(x, *weights, *step[:4], ints(0), **how)  # type: ignore[arg-type]
    qkv, gates, out = layer.random(2, layer.channels), torch.zeros(2, 8), layer.random(2, 4, 16)
    with pytest.raises(ValueError, match="heads: got 4 of values and 3 of keys, wanted a multiple"):
        delta_decode(qkv, gates, states, ints(0, 1), ints(2, 2), num_key_heads=3, out_BHV=out)
    with pytest.raises(ValueError, match="heads of values: got 8 numbers, wanted a power of two, 16 to 128"):
        delta_decode(
            qkv, gates, states[..., :8].contiguous(), ints(0, 1), ints(2, 2), num_key_heads=2, out_BHV=out
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"states: got torch.float64, wanted torch.float32 or"):
        delta_prefill(qkv, gates, states.double(), ints(0), ints(0), ints(0, 2), num_key_heads=2, out_THV=out)
    with pytest.raises(ValueError, match=r"out: got shape \[1, 4, 16\], wanted \[2, 4, 16\]"):
        delta_prefill(qkv, gates, states, ints(0), ints(0), ints(0, 2), num_key_heads=2, out_THV=out[:1])
    with pytest.raises(ValueError, match="first_column: got 201, wanted one with 64 of the 264 columns behind"):
        gated_head_norm(out, x, 201, torch.ones(16), 1e-6, rows=None)
    with pytest.raises(ValueError, match=r"pools: got shape \[2, 8\], wanted \[layers, slots, ...\]"):
        copy_places(gates, torch.zeros(1, 2).int())


def test_with_kernels() -> None:
    rerun_interpreted(__file__)
