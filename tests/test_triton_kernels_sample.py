"""Sampling: greedy, noise, thresholds, frequencies, bans and the append, by the reference and by the kernels."""

import math

import pytest
import torch
from torch import Tensor

from covering import long
from interpreted import rerun_interpreted
from plain_sampling import deviations, plain_allowed, plain_gumbel
from slot_tables import random_table
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.noise import gumbel_reference
from tercet.triton_kernels.sample import TokenRing, sample, sample_into, sample_reference
from tercet.triton_kernels.slot_table import MAX_STOP_IDS, SlotTable

INTS = torch.int32
TYPES = [torch.float32, long(torch.float16)] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


def table_for(rows: int, vocab: int, seed: int = 0, length: int = 64) -> SlotTable:
    table = random_table(rows + 1, length // 16, 16, vocab, seed)
    table.length_S[:rows] = table.length_S[:rows].clamp(max=length - 1)
    return table


def copy_of(table: SlotTable) -> SlotTable:
    return SlotTable(**{name: getattr(table, name).clone() for name in SlotTable.__dataclass_fields__})


def spaced(logits: Tensor, gap: int) -> Tensor:
    """The same numbers in rows that lie apart, with NaN between them."""
    wide = torch.full((logits.shape[0], logits.shape[1] + gap), float("nan"), dtype=logits.dtype)
    wide[:, : logits.shape[1]] = logits
    return wide[:, : logits.shape[1]]


def check_state(before: SlotTable, after: SlotTable, tokens: list[int], slots: list[int], positions: list[int]) -> None:
    """The table changed exactly as the tokens say."""
    wanted = copy_of(before)
    for token, slot, position in zip(tokens, slots, positions, strict=True):
        if position < 0:
            assert token == -1
            continue
        wanted.token_ids_SL[slot, position] = token
        wanted.length_S[slot] = position + 1
        stopped = token in wanted.stop_ids_SE[slot].tolist() and position >= int(wanted.min_length_S[slot])
        if stopped or position + 1 >= min(int(wanted.max_length_S[slot]), wanted.token_ids_SL.shape[1]):
            wanted.done_S[slot] = 1
    for name in SlotTable.__dataclass_fields__:
        assert torch.equal(getattr(after, name), getattr(wanted, name)), name


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocab", [7, 419, 2500])
def test_greedy_takes_the_first_largest(dtype: torch.dtype, vocab: int) -> None:
    rows = 6
    table = table_for(rows, vocab, seed=vocab)
    logits = torch.randint(-9, 9, (rows, vocab), generator=torch.Generator().manual_seed(vocab)).to(dtype)
    logits[1] = -3.0
    logits[2, -1] = 100.0
    logits[3, vocab // 2 :] = 50.0
    logits[4] = float("-inf")
    logits[4, 5] = -1000.0
    slots = torch.tensor([3, 0, 5, 2, 4, rows], dtype=INTS)
    positions = table.length_S[slots.long()].clone()
    positions[-1] = -1  # padding
    before = copy_of(table)
    table.max_length_S[5] = before.max_length_S[5] = int(positions[2]) + 1
    tokens = sample(spaced(logits, 13), slots, positions, table).tolist()
    wanted = [next(i for i, x in enumerate(row) if x == max(row)) for row in logits.tolist()]
    assert tokens == [*wanted[:5], -1]
    assert tokens[2] == vocab - 1
    assert tokens[4] == 5
    check_state(before, table, tokens, slots.tolist(), positions.tolist())
    assert int(table.done_S[5]) == 1


def test_stop_ids_end_a_request_and_are_banned_before_min_length() -> None:
    vocab = 100
    table = table_for(4, vocab)
    table.stop_ids_SE[:4, :3] = torch.tensor([7, 99, 0])
    table.stop_ids_SE[3] = torch.arange(90, 90 + MAX_STOP_IDS)
    logits = torch.zeros(4, vocab)
    logits[:, 7], logits[:, 99], logits[:, 0], logits[:, 42] = 10.0, 9.0, 8.0, 5.0
    logits[3, 90:98] = 20.0
    slots = torch.arange(4, dtype=INTS)
    positions = table.length_S[:4].clone()
    table.min_length_S[0] = positions[0] + 1  # banned here
    table.min_length_S[1] = positions[1]  # allowed from here on
    table.min_length_S[3] = positions[3] + 5
    before = copy_of(table)
    tokens = sample(logits, slots, positions, table).tolist()
    assert tokens == [42, 7, 7, 7]
    assert table.done_S[:4].tolist() == [0, 1, 1, 0]
    check_state(before, table, tokens, slots.tolist(), positions.tolist())
    table.temperature_S[:] = 0.01  # drawn tokens obey the ban as well
    table.length_S[0] = positions[0]
    assert sample(logits[:1], slots[:1], positions[:1], table).tolist() == [42]


def test_noise_is_the_hash_of_seed_position_and_token() -> None:
    seeds = [0, 1, 2**32 - 1, 2**32, 2**63 - 1, 0x123456789ABCDEF]
    positions = [0, 1, 31, 4096, 77, 2**20]
    got = gumbel_reference(torch.tensor(seeds), torch.tensor(positions, dtype=INTS), 3000)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        wanted = [plain_gumbel(seed, position, token) for token in range(3000)]
        torch.testing.assert_close(got[row], torch.tensor(wanted), rtol=1e-5, atol=1e-5)


def test_drawn_tokens_are_the_plain_argmax() -> None:
    """Every row on its own temperature, seed and position, against the definition in Python."""
    rows, vocab = 5, 130
    table = table_for(rows, vocab, seed=9)
    table.temperature_S[:rows] = torch.tensor([0.3, 1.0, 2.5, 0.7, 1e-6])
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)) * 2
    slots = torch.arange(rows, dtype=INTS)
    positions = table.length_S[:rows].clone()
    wanted = []
    for row in range(rows):
        temperature = float(table.temperature_S[row])
        seed, position = int(table.seed_S[row]), int(positions[row])
        if temperature < 1e-5:
            scores = logits[row].tolist()
        else:
            scores = [x / temperature + plain_gumbel(seed, position, i) for i, x in enumerate(logits[row].tolist())]
        wanted.append(max(range(vocab), key=scores.__getitem__))
    assert sample(logits, slots, positions, table).tolist() == wanted


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(1, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.2), (9, 0.8, 0.0), (30, 0.9, 0.05), (0, 1e-6, 0.0)],
)
def test_only_allowed_tokens_and_all_of_them(dtype: torch.dtype, top_k: int, top_p: float, min_p: float) -> None:
    vocab, draws = 60, 10 if INTERPRETED else 4000
    logits = (torch.randn(vocab, generator=torch.Generator().manual_seed(top_k + 1)) * 1.5).to(dtype)
    logits[17] = logits[18]
    table = table_for(draws, vocab)
    table.temperature_S[:] = 0.9
    table.top_k_S[:], table.top_p_S[:], table.min_p_S[:] = top_k, top_p, min_p
    allowed = plain_allowed(logits.tolist(), 0.9, top_k, top_p, min_p)
    got = set(
        sample(
            logits.expand(draws, -1), torch.arange(draws, dtype=INTS), table.length_S[:draws].clone(), table
        ).tolist()
    )
    assert got <= allowed
    if not INTERPRETED:
        weights = torch.softmax(logits[sorted(allowed)].float() / 0.9, 0)
        likely = {token for token, weight in zip(sorted(allowed), weights.tolist(), strict=True) if weight > 0.005}
        assert got >= likely


@pytest.mark.parametrize("dtype", TYPES)
def test_kernel_and_reference_agree(dtype: torch.dtype) -> None:
    """Random parameters in every row: the same tokens and the same table."""
    rows, vocab = 24, 1300
    for seed in range(2):
        g = torch.Generator().manual_seed(seed)
        table = table_for(rows, vocab, seed)
        table.temperature_S[:] = torch.rand(rows + 1, generator=g) * 2
        table.temperature_S[:4] = 0.0
        table.top_k_S[:] = torch.randint(0, 40, (rows + 1,), generator=g, dtype=INTS)
        table.top_k_S[6:12] = 0
        table.top_p_S[:] = 0.3 + torch.rand(rows + 1, generator=g)
        table.min_p_S[12:20] = torch.rand(8, generator=g) * 0.3
        table.stop_ids_SE[:, :2] = torch.randint(0, vocab, (rows + 1, 2), generator=g, dtype=INTS)
        table.min_length_S[::2] = 60
        logits = spaced((torch.randn(rows, vocab, generator=g) * 3).to(dtype), 5)
        slots = torch.randperm(rows, generator=g).to(INTS)
        positions = table.length_S[slots.long()].clone()
        positions[5] = -1
        ours, theirs = copy_of(table), copy_of(table)
        got = sample(logits, slots, positions, ours)
        assert got.tolist() == sample_reference(logits, slots, positions, theirs).tolist()
        check_state(table, ours, got.tolist(), slots.tolist(), positions.tolist())


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("vocab", [7, 2500])
def test_logits_that_are_no_numbers(vocab: int, temperature: float) -> None:
    """They are as if they were not there; where nothing else is, the lowest id."""
    table = table_for(4, vocab)
    table.temperature_S[:] = temperature
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(5))
    logits[0, 3], logits[1, ::2], logits[2], logits[3, 1:] = [float("nan")] * 4
    slots, positions = torch.arange(4, dtype=INTS), table.length_S[:4].clone()
    wanted = sample(logits.nan_to_num(float("-inf")), slots, positions, copy_of(table)).tolist()
    assert sample(logits, slots, positions, copy_of(table)).tolist() == wanted
    assert wanted[2:] == [0, 0]
    table.top_k_S[:], table.top_p_S[:], table.min_p_S[:] = 3, 0.9, 0.1
    wanted = sample(logits.nan_to_num(float("-inf")), slots, positions, copy_of(table)).tolist()
    assert sample(logits, slots, positions, table).tolist() == wanted


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(1, 1.0, 0.0), (2, 1.0, 0.0), (0, 0.1, 0.0), (0, 1.0, 1.0)])
def test_both_zeros_are_alike(dtype: torch.dtype, top_k: int, top_p: float, min_p: float) -> None:
    rows = 12
    table = table_for(rows, 4)
    table.temperature_S[:] = 1.0
    table.top_k_S[:], table.top_p_S[:], table.min_p_S[:] = top_k, top_p, min_p
    logits = torch.tensor([-3.0, -0.0, 0.0, -0.0], dtype=dtype).expand(rows, -1)
    slots, positions = torch.arange(rows, dtype=INTS), table.length_S[:rows].clone()
    tokens = sample(logits, slots, positions, copy_of(table)).tolist()
    assert tokens == sample(logits + 0.0, slots, positions, table).tolist()
    assert set(tokens) == {1, 2, 3}


@pytest.mark.skipif(INTERPRETED, reason="tens of thousands of draws; kernel and reference agree token by token")
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0), (1.7, 0, 1.0, 0.0), (1.0, 8, 1.0, 0.0), (0.8, 0, 0.7, 0.0),
     (1.2, 0, 1.0, 0.1), (1.1, 12, 0.9, 0.05)],
)  # fmt: skip
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_frequencies_follow_the_softmax(temperature: float, top_k: int, top_p: float, min_p: float, vary: str) -> None:
    """Chi-square over many seeds at one position, and over many positions of one seed."""
    vocab, draws = 40, 20_000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(11)) * 1.3
    rows = 500
    table = table_for(rows, vocab, seed=1, length=draws)
    table.temperature_S[:] = temperature
    table.top_k_S[:], table.top_p_S[:], table.min_p_S[:] = top_k, top_p, min_p
    slots = torch.arange(rows, dtype=INTS)
    tokens = []
    for numbers in torch.arange(draws).split(rows):
        table.seed_S[:rows] = numbers if vary == "seed" else 4
        positions = torch.full_like(slots, 17) if vary == "seed" else numbers.to(INTS)
        tokens.append(sample(logits.expand(rows, -1), slots, positions, table))
    allowed = sorted(plain_allowed(logits.tolist(), temperature, top_k, top_p, min_p))
    expected = torch.softmax(logits[allowed].double() / temperature, 0) * draws
    counts = torch.bincount(torch.cat(tokens), minlength=vocab).double()
    assert int(counts.sum()) == int(counts[allowed].sum()) == draws
    assert deviations(counts[allowed].tolist(), expected.tolist()) < 5  # more: once in millions of runs


@pytest.mark.skipif(INTERPRETED, reason="speaks of the noise, not of a kernel")
def test_neighbouring_seeds_and_positions_are_independent() -> None:
    """Noise of neighbours is uncorrelated, so that requests with seeds 1, 2, 3 do not move alike."""
    seeds = torch.arange(60)
    by_seed = gumbel_reference(seeds, torch.full((60,), 5, dtype=INTS), 2000)
    by_position = gumbel_reference(torch.full((60,), 5), seeds.to(INTS), 2000)
    for noise in (by_seed, by_position):
        correlation = torch.corrcoef(noise.double()) - torch.eye(60)
        assert float(correlation.abs().max()) < 6 / math.sqrt(2000)
        assert abs(float(noise.mean()) - 0.5772) < 0.02
        assert abs(float(noise.var()) - math.pi**2 / 6) < 0.05


@pytest.mark.skipif(INTERPRETED, reason="speaks of the noise, not of a kernel")
@pytest.mark.parametrize("kind", ["any", "in a row", "of one low word"])
def test_no_seed_has_what_another_has_elsewhere(kind: str) -> None:
    """All 64 bits count, so that no two seeds are alike, nor shifted: if 32 did, some dozen rows would be."""
    seeds = torch.arange(40_000) + 2**40
    if kind == "any":
        seeds = torch.randint(2**63 - 1, (40_000,), generator=torch.Generator().manual_seed(1))
    elif kind == "of one low word":
        seeds = (seeds << 32) + 5
    rows = [gumbel_reference(seeds, torch.full((len(seeds),), position, dtype=INTS), 3) for position in range(8)]
    assert len(torch.cat(rows).unique(dim=0)) == 8 * len(seeds)


@pytest.mark.skipif(not INTERPRETED, reason="a ring is for kernels")
def test_tokens_go_round_the_ring() -> None:
    table = table_for(3, 50)
    ring = TokenRing(torch.full((2, 5), -9, dtype=INTS), torch.zeros(1, dtype=INTS))
    slots, positions = torch.arange(3, dtype=INTS), torch.tensor([4, -1, 6], dtype=INTS)
    for turn, (tokens, place) in enumerate([((3, 4), 1), ((5, 6), 0), ((7, 8), 1)]):
        logits = torch.zeros(3, 50)
        logits[0, tokens[0]] = logits[2, tokens[1]] = 1.0
        sample_into(ring, logits, slots, positions + turn * (positions >= 0).to(INTS), table)
        assert int(ring.turn_1) == place
        assert ring.places_KR[place].tolist() == [tokens[0], -1, tokens[1], -9, -9]
    assert ring.places_KR[0].tolist() == [5, -1, 6, -9, -9]
    with pytest.raises(ValueError, match=r"places: got shape \[2, 2\], wanted \[\*, 3 or more\]"):
        sample_into(TokenRing(torch.zeros(2, 2, dtype=INTS), ring.turn_1), logits, slots, positions, table)


def test_wrong_arguments_are_refused() -> None:
    table = table_for(2, 50)
    slots, positions = torch.zeros(2, dtype=INTS), torch.zeros(2, dtype=INTS)
    with pytest.raises(ValueError, match=r"positions: got shape \[1\], wanted \[2\]"):
        sample(torch.zeros(2, 50), slots, positions[:1], table)
    with pytest.raises(ValueError, match=r"slots: got torch\.int64"):
        sample(torch.zeros(2, 50), slots.long(), positions, table)
    with pytest.raises(ValueError, match=r"logits: got torch\.float64"):
        sample(torch.zeros(2, 50, dtype=torch.float64), slots, positions, table)
    with pytest.raises(ValueError, match="rows without gaps"):
        sample(torch.zeros(2, 100)[:, ::2], slots, positions, table)


def test_interpreted() -> None:
    rerun_interpreted(__file__)
