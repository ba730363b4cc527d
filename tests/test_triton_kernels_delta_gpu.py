"""On a GPU: gated delta layers against float64, token by token, over NaN where nothing is; a token's own bits."""

import random

import pytest
import torch
from torch import Tensor

from carried_layers import CarriedLayer, check_step
from delta_layers import DeltaLayer
from tercet.triton_kernels.copy_places import copy_places
from tercet.triton_kernels.delta_prefill import delta_prefill
from tercet.triton_kernels.gated_head_norm import gated_head_norm
from tercet.triton_kernels.sigmoid_gate import gate_by_sigmoid
from tried_layers import TriedLayers, plain_steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = [(16, 32, 128, 128), (16, 48, 128, 128), (16, 16, 128, 128), (2, 6, 128, 128)]
"""Key and value heads, their numbers."""
NEAR = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 5e-6}
"""Of all numbers together; a vector may be twelve times as far, beside its length, or the usual one if that is more."""
NAN = float("nan")


def assert_all_near(pairs: list[tuple[Tensor, Tensor]], dtype: torch.dtype, times: float = 1) -> None:
    """Together: of single tokens some answer next to nothing, since query and key have next to nothing in common."""
    got, wanted = (torch.cat([pair[part].flatten(0, -2) for pair in pairs]) for part in range(2))
    assert_near(got, wanted, dtype, times)


def assert_near(got: Tensor, wanted: Tensor, dtype: torch.dtype, times: float = 1) -> None:
    errors, lengths = (got.double() - wanted).norm(dim=-1), wanted.norm(dim=-1)
    usual = lengths.square().mean().sqrt()
    whole, largest = errors.square().mean().sqrt() / usual, (errors / lengths.maximum(usual)).max()
    assert whole < times * NEAR[dtype], (float(whole), float(largest))
    assert largest < 12 * times * NEAR[dtype], (float(whole), float(largest))


def check_on_card(
    layer: CarriedLayer, rows: list[tuple[int, int]], chunks: list[tuple[int, int, int]], padding: int, times: float = 1
) -> None:
    outs: list[tuple[Tensor, Tensor]] = []
    check_step(
        layer, 12, rows, chunks, padding,
        lambda got, wanted: outs.append((got, wanted)),
        lambda got, wanted: assert_near(got, wanted, layer.dtype, times),
    )  # fmt: skip
    assert_all_near(outs, layer.dtype, times)


def on_card(K: int, H: int, D: int, V: int, dtype: torch.dtype = torch.bfloat16) -> DeltaLayer:
    return DeltaLayer(K, H, D, V, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("K", "H", "D", "V"), SIZES)
def test_step(K: int, H: int, D: int, V: int, dtype: torch.dtype) -> None:
    layer = on_card(K, H, D, V, dtype)
    rows = [(slot, length) for slot, length in enumerate([5, 1, 0, 700, 2, 1])]
    for chunks, padding in (
        ([(6, 0, 1500), (7, 64, 65), (9, 0, 0), (8, 128, 1), (10, 0, 200)], 77),
        ([(6, 0, 4096)], 0),
        ([(7, 64, 7)], 9),
        ([], 0),
    ):
        check_on_card(layer, rows, chunks, padding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("K", "H", "D", "V"), SIZES)
def test_bits_of_a_prompt_however_it_is_cut(K: int, H: int, D: int, V: int, dtype: torch.dtype) -> None:
    layer, count = on_card(K, H, D, V, dtype), 1100
    x, answers = layer.tokens(count), []
    for cuts in ([count], [64, 128, 908], [640, 460], [64] * 17 + [12]):
        tails, states = layer.pools(60)
        tails[1] = states[1] = NAN
        outs, start = [], 0
        for size in cuts:
            beside = len(cuts) > 1
            rows = [(slot, random.randint(0, 9)) for slot in range(20, random.choice([21, 30, 60]))] * beside
            ahead, behind = [(2, 64, random.randint(0, 400))] * beside, [(3, 0, random.randint(1, 99))] * beside
            first = len(rows) + sum(chunk[2] for chunk in ahead)
            tokens = (layer.tokens(first), x[start : start + size], layer.tokens(sum(chunk[2] for chunk in behind)))
            out = layer.run(torch.cat(tokens), tails, states, rows, [*ahead, (1, start, size), *behind])
            outs.append(out[first : first + size])
            start += size
        answers.append((torch.cat(outs), states[1], tails[1]))
    for answer in answers[1:]:
        assert all(map(torch.equal, answer, answers[0]))


@pytest.mark.parametrize(("K", "H", "D", "V"), SIZES)
def test_decode(K: int, H: int, D: int, V: int) -> None:
    """Of 1 to 256 rows; a row's bits alone and in company."""
    layer, outs = on_card(K, H, D, V), []
    for B in (1, 7, 256):
        tails, states = layer.pools(B + 1)
        rows = [(slot, random.choice([0, 1, 2, 500])) for slot in random.sample(range(B), B)]
        old_tails, old_states = tails.clone(), states.clone()
        x = layer.tokens(B)
        out = layer.run(x, tails, states, rows, [])
        for at in random.sample(range(B), min(B, 12)):
            slot, length = rows[at]
            if length:
                pair = (old_tails[slot], old_states[slot]) if length > 1 else (None, None)
                wanted, _, wanted_state = layer.exact(x[at : at + 1], *pair)
                outs.append((out[at], wanted[0]))
                assert_near(states[slot], wanted_state, layer.dtype)
            again = old_tails.clone(), old_states.clone()
            alone = layer.run(x[at : at + 1], *again, [rows[at]], [])
            assert torch.equal(alone[0], out[at])
            assert torch.equal(again[0][slot], tails[slot])
            assert torch.equal(again[1][slot], states[slot])
    assert_all_near(outs, layer.dtype)


def some_slots(count: int, each: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Which slots, how long, how many tokens of each are tried; how many of those hold."""
    slots = [
        (slot, random.choice([1, 2, 3, 700]), random.choice([0, 1, each, each]))
        for slot in random.sample(range(count + 2), count)
    ]
    return slots, [random.randint(0, tries) for _, _, tries in slots]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("K", "H", "D", "V"), SIZES)
def test_tokens_that_are_tried(K: int, H: int, D: int, V: int, dtype: torch.dtype) -> None:
    """Of few and of many slots, stacked layers; what is left alone stays."""
    for count, each in ((1, 8), (16, 8), (9, 3), (2, 16)):
        slots, kept = some_slots(count, each)
        run = TriedLayers([on_card(K, H, D, V, dtype) for _ in range(3)], count + 4, slots, each)
        old_tails, old_states = run.states.tails_LSTC.clone(), run.states.states_LSHDV.clone()
        answers, outs = run.run(), []
        assert torch.equal(run.states.states_LSHDV.nan_to_num(7), old_states.nan_to_num(7))
        assert torch.equal(run.states.tails_LSTC.nan_to_num(7), old_tails.nan_to_num(7))
        run.settle(kept, count + 3)
        for index, layer in enumerate(run.layers):
            moved = set()
            for row, ((slot, length, tries), held) in enumerate(zip(slots, kept, strict=True)):
                first, x = row * each, run.of_slot(index, row)
                pair = (old_tails[index, slot], old_states[index, slot]) if length > 1 else (None, None)
                if tries:
                    outs.append((answers[index][first : first + tries], layer.exact(x, *pair)[0]))
                assert not answers[index][first + tries : first + each].count_nonzero()
                if held:
                    moved.add(slot)
                    _, wanted_tails, wanted_state = layer.exact(x[:held], *pair)
                    assert_near(run.states.states_LSHDV[index, slot], wanted_state, dtype)
                    assert torch.equal(run.states.tails_LSTC[index, slot].double(), wanted_tails)
            for slot in set(range(count + 4)) - moved:
                for now, old in ((run.states.tails_LSTC, old_tails), (run.states.states_LSHDV, old_states)):
                    assert torch.equal(now[index, slot].nan_to_num(7), old[index, slot].nan_to_num(7))
        if outs:
            assert_all_near(outs, dtype)


@pytest.mark.parametrize(
    ("dtype", "kept_in"),
    [(torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float16)],
)
@pytest.mark.parametrize(("K", "H", "D", "V"), SIZES)
def test_bits_of_tokens_that_are_tried_are_those_of_plain_steps(
    K: int, H: int, D: int, V: int, dtype: torch.dtype, kept_in: torch.dtype
) -> None:
    """Alone or not, in steps with as many rows as make other tiles; and of the states that come of them."""
    for count, each in ((1, 8), (7, 4), (16, 8)):
        slots, kept = some_slots(count, each)
        run = TriedLayers([on_card(K, H, D, V, dtype) for _ in range(2)], count + 3, slots, each, kept_in)
        old_tails, old_states = run.states.tails_LSTC.clone(), run.states.states_LSHDV.clone()
        answers = run.run()
        run.settle(kept, count + 3)
        for index, layer in enumerate(run.layers):
            for row, ((slot, length, tries), held) in enumerate(zip(slots, kept, strict=True)):
                tails, states = old_tails[index].clone(), old_states[index].clone()
                found = plain_steps(layer, run.of_slot(index, row)[:held], tails, states, slot, length)
                assert torch.equal(found, answers[index][row * each : row * each + held])
                if held:
                    assert torch.equal(run.states.tails_LSTC[index, slot], tails[slot])
                    assert torch.equal(run.states.states_LSHDV[index, slot], states[slot])
                rest = run.of_slot(index, row)[held:]
                found = plain_steps(layer, rest, tails, states, slot, length + held)
                assert torch.equal(found, answers[index][row * each + held : row * each + tries])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys_that_are_all_alike(dtype: torch.dtype) -> None:
    """Nothing decays, and each token replaces what the last one said: no digit of the inverse is lost."""
    H, D, V, T = 4, 128, 128, 300
    qkv = torch.randn(T, 2 * D + H * V, device="cuda")
    qkv[:, : 2 * D] = torch.nn.functional.normalize(torch.randn(2, D, device="cuda"), dim=1).flatten()
    qkv = qkv.to(dtype)
    gates = torch.cat((torch.zeros(T, H), torch.ones(T, H)), 1).cuda()
    states = torch.full((1, H, D, V), NAN, device="cuda")
    out = torch.full((T, H, V), NAN, device="cuda", dtype=dtype)
    ints = [torch.tensor(numbers, dtype=torch.int32, device="cuda") for numbers in ([0], [0], [0, T])]
    delta_prefill(qkv, gates, states, *ints, num_key_heads=1, out_THV=out)
    q, k, v = qkv[0, :D].double(), qkv[0, D : 2 * D].double(), qkv[:, 2 * D :].view(T, H, V).double()
    wanted = v * (q @ k)
    assert_near(out, wanted, dtype, 4)
    assert_near(states[0], k[None, :, None] * v[-1][:, None], dtype, 4)


@pytest.mark.parametrize("T", [1, 300])
def test_gates_and_copies(T: int) -> None:
    H, V, first = 32, 128, 24
    x = torch.randn(T, H, V, device="cuda").bfloat16()
    z = torch.randn(T, H * V + 88, device="cuda").bfloat16()
    weight, gates = torch.rand(V, device="cuda"), z[:, first : first + H * V].double()
    got = gated_head_norm(x, z, first, weight, 1e-6, rows=None)
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    assert_near(got, normed.flatten(1) * gates * gates.sigmoid(), x.dtype)
    flat = x.flatten(1).clone()
    gate_by_sigmoid(flat, z, first, rows=None)
    assert_near(flat, wide.flatten(1) * gates.sigmoid(), x.dtype)
    pools = torch.randn(3, 9, 2, T, device="cuda")
    old, pairs = pools.clone(), torch.tensor([[1, 5], [-1, -1], [2, 7]], dtype=torch.int32, device="cuda")
    copy_places(pools, pairs)
    old[:, [5, 7]] = old[:, [1, 2]]
    assert torch.equal(pools, old)
