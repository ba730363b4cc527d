"""Penalties, biases, masks and log-probabilities against plain Python, by the references and by the kernels."""

import math

import pytest
import torch

from covering import long
from interpreted import rerun_interpreted
from slot_tables import random_table
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.log_probabilities import log_probabilities, unpack
from tercet.triton_kernels.logits import add_bias, penalize, widen

INTS = torch.int32
VOCAB, ROWS, SLOTS = 133, 4, 6
TYPES = [torch.float32, long(torch.float16)] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


def wide(rows: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random logits in rows that lie apart."""
    return (torch.randn(rows, vocab + 7, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)[:, :vocab]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocab", [32, 33, VOCAB, 2500])
def test_a_wide_copy_of_what_is_allowed(dtype: torch.dtype, vocab: int) -> None:
    logits = wide(5, vocab, dtype)
    logits[2, 7] = float("-inf")
    before = logits.clone()
    words = -(-vocab // 32) + 1
    mask = torch.randint(-(2**31), 2**31 - 1, (3, words), generator=torch.Generator().manual_seed(2)).to(INTS)
    mask[1] = -1
    mask[2] = 0
    mask[2, 0] = -(2**31)
    slots = [2, 0, 1, 3, -1]
    copy = widen(logits, torch.tensor(slots, dtype=INTS), mask)
    assert copy.dtype == torch.float32
    assert copy.is_contiguous()
    for row, slot in enumerate(slots):
        for token in range(vocab):
            word = int(mask[slot, token // 32]) if 0 <= slot < 3 else -1
            allowed = (word & 0xFFFFFFFF) >> (token % 32) & 1
            assert float(copy[row, token]) == (float(before[row, token]) if allowed else -math.inf)
    copy.zero_()
    assert torch.equal(logits, before), "a copy"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocab", [VOCAB // 4, VOCAB])
def test_penalties(dtype: torch.dtype, vocab: int) -> None:
    """Of ids that a slot has once, often, in its prompt, behind it, in both, and of some outside the vocabulary."""
    logits = wide(6, vocab, dtype)
    before = logits.clone()
    table = random_table(SLOTS, 5, 16, VOCAB // 3, 3)
    table.num_prompt_S[:] = torch.tensor([1, 9, 30, 79, 5, 20])
    table.length_S[:] = torch.tensor([60, 50, 64, 79, 80, 80])
    slots = torch.tensor([2, 0, 5, SLOTS, -1, 3], dtype=INTS)
    positions = torch.tensor([64, 50, 77, 9, 9, 79], dtype=INTS)
    repetition = torch.tensor([1.3, 1.0, 1.0, 1.5, 1.0, 0.8])
    presence = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, -0.5])
    frequency = torch.tensor([0.25, 0.0, 0.0, 0.0, 0.0, 0.1])
    penalize(logits, slots, torch.full_like(positions, -1), table, repetition, presence, frequency)
    assert torch.equal(logits, before), "rows that sample nothing stay as they are"
    penalize(logits, slots, positions, table, repetition, presence, frequency)
    assert torch.equal(logits[0], before[0]), "a neutral row keeps its bits"
    assert torch.equal(logits[3:5], before[3:5]), "a slot outside the table changes nothing"
    for row, slot in ((1, 0), (2, 5), (5, 3)):
        num_prompt = int(table.num_prompt_S[slot])
        ids = table.token_ids_SL[slot].tolist()[: int(positions[row])]  # whatever the slot's length
        for token in range(vocab):
            x, generated = float(before[row, token]), ids[num_prompt:].count(token)
            if token in ids:
                x = x / float(repetition[slot]) if x > 0 else x * float(repetition[slot])
            else:
                assert float(logits[row, token]) == x
            x -= float(frequency[slot]) * generated + (float(presence[slot]) if generated else 0.0)
            assert float(logits[row, token]) == pytest.approx(x, rel=torch.finfo(dtype).eps * 2, abs=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
def test_biases(dtype: torch.dtype) -> None:
    logits = wide(ROWS, VOCAB, dtype)
    wanted = logits.float()
    slots = torch.tensor([1, 3, 1000, 0], dtype=INTS)
    ids = torch.full((SLOTS, 5), -1, dtype=INTS)
    bias = torch.zeros(SLOTS, 5)
    ids[1, :3], bias[1, :3] = torch.tensor([0, VOCAB - 1, 7], dtype=INTS), torch.tensor([1.5, -100.0, float("-inf")])
    ids[3, 1:], bias[3, 1:] = torch.tensor([VOCAB, 2**31 - 1, 5, 6], dtype=INTS), torch.tensor([1.0, 2.0, 3.0, 4.0])
    for row, slot in ((0, 1), (1, 3)):
        for token, value in zip(ids[slot].tolist(), bias[slot].tolist(), strict=True):
            if 0 <= token < VOCAB:
                wanted[row, token] += value
    add_bias(logits, slots, ids, bias)
    assert torch.equal(logits, wanted.to(dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("vocab", "top"), [(50, 20), (50, 0), (50, 50), (5000, 3)])
def test_log_probabilities(dtype: torch.dtype, vocab: int, top: int) -> None:
    logits = wide(4, vocab, dtype, seed=vocab)
    logits[1, 10:14] = logits[1].max()  # ties go by id
    logits[2, ::2] = float("-inf")
    tokens = torch.tensor([3, 12, 4, vocab], dtype=INTS)
    chosen, ranks, top_ids, top_values = unpack(log_probabilities(logits, tokens, top))
    for row in range(4):
        x = logits[row].tolist()
        log_sum = max(x) + math.log(math.fsum(math.exp(value - max(x)) for value in x))
        token = int(tokens[row])
        if token == vocab:
            assert (float(chosen[row]), int(ranks[row])) == (-math.inf, -1)
        else:
            assert float(chosen[row]) == pytest.approx(x[token] - log_sum, abs=1e-4)
            assert int(ranks[row]) == 1 + sum(value > x[token] for value in x)
        order = sorted(range(vocab), key=lambda i: (-x[i], i))[:top]
        assert top_ids[row].tolist() == order
        assert top_values[row].tolist() == pytest.approx([x[i] - log_sum for i in order], abs=1e-4)


def test_the_likeliest_of_a_vocabulary_of_parts() -> None:
    """Large ones in every part; so many in one part, or so many equal ones, that not all are its candidates."""
    vocab, top = 20_000, 20
    logits = wide(4, vocab, torch.float32)
    logits[1, 9000:9200] += 50.0
    logits[2] = 1.0
    logits[2, 19_999] = 2.0
    logits[3, 3:19_990] = logits[3].max()
    ids, values = unpack(log_probabilities(logits, torch.zeros(4, dtype=INTS), top))[2:]
    for row in range(4):
        x = logits[row].double()
        order = sorted(range(vocab), key=lambda i: (-float(x[i]), i))[:top]
        assert ids[row].tolist() == order
        torch.testing.assert_close(values[row].double(), x.log_softmax(0)[order], rtol=0, atol=1e-4)


@pytest.mark.parametrize("vocab", [25, 5000])
def test_log_probabilities_of_what_is_no_number(vocab: int) -> None:
    logits, tokens = wide(4, vocab, torch.float32), torch.tensor([3, 3, 4, 0], dtype=INTS)
    logits[0, 3], logits[1, 4:], logits[2, ::2], logits[3] = [float("nan")] * 4
    got, wanted = (unpack(log_probabilities(x, tokens, 20)) for x in (logits, logits.nan_to_num(float("-inf"))))
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert all(sorted(set(ids)) == sorted(ids) and 0 <= min(ids) <= max(ids) < vocab for ids in got[2].tolist())


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted at least 5"):
        widen(torch.zeros(2, VOCAB), torch.zeros(2, dtype=INTS), torch.zeros(2, 4, dtype=INTS))
    with pytest.raises(ValueError, match="num_top is 51; want 0 to 50"):
        log_probabilities(torch.zeros(1, 50), torch.zeros(1, dtype=INTS), 51)
    with pytest.raises(ValueError, match=r"bias: got shape \[2, 3\]"):
        add_bias(torch.zeros(1, 50), torch.zeros(1, dtype=INTS), torch.zeros(2, 4, dtype=INTS), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="rows without gaps"):
        widen(torch.zeros(2, 100)[:, ::2], torch.zeros(2, dtype=INTS), torch.zeros(2, 2, dtype=INTS))


def test_interpreted() -> None:
    rerun_interpreted(__file__)
