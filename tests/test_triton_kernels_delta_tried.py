"""Layers that carry states and try tokens: against the rule in float64, over NaN where nothing is, and bits.

The references here; the kernels in Triton's interpreter, by running this file once more.
"""

from dataclasses import replace

import pytest
import torch

from covering import long
from delta_layers import DeltaLayer
from interpreted import rerun_interpreted
from mamba_layers import MambaLayer
from tercet.triton_kernels.delta_settle import delta_settle
from tercet.triton_kernels.delta_tried import delta_tried
from tercet.triton_kernels.tried_tokens import TriedTokens
from tried_layers import TriedLayers, plain_steps

NEAR = {"rtol": 1e-4, "atol": 1e-5}
SIZES = ("K", "H", "D", "V", "W")
"""Key and value heads, their numbers, taps."""
CASES = [(2, 4, 16, 32, 4), long(1, 3, 16, 128, 2), long(3, 3, 64, 16, 8)]
PLACES, SLOTS = 9, 7

Kind = type[DeltaLayer] | type[MambaLayer]
Slots = tuple[int, list[tuple[int, int, int]], list[int]]
STEPS: list[Slots] = [
    # Some have no room for all guesses, one is done, one is new; none, some or all hold.
    (4, [(3, 70, 4), (0, 1, 4), (6, 0, 0), (5, 2, 1), (1, 9, 3), (2, 5, 4)], [2, 1, 0, 1, 0, 4]),
    (1, [(4, 3, 1)], [1]),
    long(16, [(4, 3, 16), (6, 0, 0), (6, 0, 0), (0, 1, 11)], [16, 0, 0, 3]),
    (2, [(99, 7, 2), (-1, 5, 2), (2, 3, 2)], [1, 1, 2]),  # outside
]


@pytest.mark.parametrize("kind", [DeltaLayer, MambaLayer])
@pytest.mark.parametrize(("each", "slots", "kept"), STEPS)
@pytest.mark.parametrize(SIZES, CASES)
def test_step(
    K: int, H: int, D: int, V: int, W: int, each: int, slots: list[tuple[int, int, int]], kept: list[int], kind: Kind
) -> None:
    run = TriedLayers([kind(K, H, D, V, W) for _ in range(2)], PLACES, slots, each)
    old_tails, old_states = run.states.tails_LSTC.clone(), run.states.states_LSHDV.clone()
    outs = run.run()
    assert torch.equal(run.states.tails_LSTC.nan_to_num(7), old_tails.nan_to_num(7))
    assert torch.equal(run.states.states_LSHDV.nan_to_num(7), old_states.nan_to_num(7))
    run.settle(kept, SLOTS)
    for index, layer in enumerate(run.layers):
        moved = set()
        for row, ((slot, length, count), held) in enumerate(zip(slots, kept, strict=True)):
            first, x = row * each, run.of_slot(index, row)
            if 0 <= slot < PLACES and count:
                begun = length > 1
                pair = (old_tails[index, slot], old_states[index, slot]) if begun else (None, None)
                wanted, _, _ = layer.exact(x, *pair)
                torch.testing.assert_close(outs[index][first : first + count], wanted.float(), **NEAR)
                if held:
                    moved.add(slot)
                    _, wanted_tails, wanted_state = layer.exact(x[:held], *pair)
                    torch.testing.assert_close(run.states.states_LSHDV[index, slot], wanted_state.float(), **NEAR)
                    assert torch.equal(run.states.tails_LSTC[index, slot], wanted_tails.float())
            else:
                count = 0
            assert not outs[index][first + count : first + each].count_nonzero()
        for slot in set(range(PLACES)) - moved:
            for now, old in ((run.states.tails_LSTC, old_tails), (run.states.states_LSHDV, old_states)):
                assert torch.equal(now[index, slot].nan_to_num(7), old[index, slot].nan_to_num(7))


@pytest.mark.parametrize("kind", [DeltaLayer, MambaLayer])
@pytest.mark.parametrize(
    ("dtype", "kept_in"),
    [(torch.float32,) * 2, (torch.float32, torch.float16), long(torch.float16, torch.float32)],
)
@pytest.mark.parametrize(("K", "H", "D", "V", "W"), [(1, 1, 16, 128, 4), long(2, 6, 16, 16, 3)])
def test_bits_are_those_of_plain_steps(
    K: int, H: int, D: int, V: int, W: int, dtype: torch.dtype, kept_in: torch.dtype, kind: Kind
) -> None:
    """Of what tokens find, and of states and tails behind those that hold; then of a token that is decoded."""
    slots, kept = [(3, 70, 5), (0, 1, 5), (6, 0, 0), (5, 2, 1)], [5, 2, 0, 0]
    run = TriedLayers([kind(K, H, D, V, W, dtype=dtype) for _ in range(2)], PLACES, slots, 5, kept_in)
    old_tails, old_states = run.states.tails_LSTC.clone(), run.states.states_LSHDV.clone()
    outs = run.run()
    run.settle(kept, SLOTS)
    for index, layer in enumerate(run.layers):
        for row, ((slot, length, count), held) in enumerate(zip(slots, kept, strict=True)):
            if not count:
                continue
            x, first = run.of_slot(index, row), row * 5
            pair = old_tails[index].clone(), old_states[index].clone()
            found = plain_steps(layer, x[:held], *pair, slot, length)
            beyond = pair[0].clone(), pair[1].clone()
            found = torch.cat((found, plain_steps(layer, x[held:], *beyond, slot, length + held)))
            assert torch.equal(found, outs[index][first : first + count])
            now = run.states.tails_LSTC[index].clone(), run.states.states_LSHDV[index].clone()
            for ours, theirs in zip(now, pair, strict=True):
                assert torch.equal(ours[slot].nan_to_num(7), theirs[slot].nan_to_num(7))
            one, step = layer.tokens(1), (slot, length + held)
            assert torch.equal(layer.run(one, *now, [step], []), layer.run(one, *pair, [step], []))


def test_bad_input() -> None:
    run = TriedLayers([DeltaLayer(2, 4, 16, 16)], 3, [(0, 5, 2), (1, 7, 2)], 2)
    layer, states, left = run.layers[0], run.states, run.states.tries
    assert left is not None
    pools = states.tails_LSTC[0], states.states_LSHDV[0]
    qkv, gates, out = left.qkv_LTC[0, :4], left.gates_LT2H[0, :4], layer.random(4, 4, 16)
    with pytest.raises(ValueError, match="slots: got 4 tokens, wanted 3 of each slot"):
        delta_tried(qkv, gates, states.states_LSHDV[0], run.tried._replace(each=3), num_key_heads=2, out_THV=out)
    with pytest.raises(ValueError, match=r"slots: got shape \[4\], wanted \[3\]"):
        delta_tried(qkv[:3], gates[:3], states.states_LSHDV[0], run.tried, num_key_heads=2, out_THV=out[:3])
    with pytest.raises(ValueError, match=r"gates: got shape \[3, 8\], wanted \[4, 8\]"):
        layer.try_tokens(run.tokens[0], *pools, run.tried, replace(left.of_layer(0).cut(4), gates_T2H=gates[:3]))
    stacked = left.inputs_LTC, left.qkv_LTC, left.gates_LT2H, states.tails_LSTC, states.states_LSHDV
    with pytest.raises(ValueError, match="known: got 4 slots, wanted 3 at most"):
        delta_settle(*stacked, run.tried, layer.ints(1, 2, 3, 4), num_key_heads=2)
    many = TriedTokens(layer.ints(*[0] * 8), layer.ints(*[0] * 8), 2)
    with pytest.raises(ValueError, match="slots: got 8 tokens, wanted 7 at most"):
        delta_settle(*stacked, many, layer.ints(1, 2, 3), num_key_heads=2)


def test_with_kernels() -> None:
    rerun_interpreted(__file__)
