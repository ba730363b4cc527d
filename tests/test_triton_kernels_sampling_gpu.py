"""On a GPU: from plan to token: slot table, step inputs, penalties, log-probabilities, the draw.

Integers equal the references, which tests on the CPU hold to plain Python; numbers are float64's; and tokens come as
often as the softmax says.
"""

import random
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from plain_sampling import deviations, plain_allowed
from slot_tables import empty_step, random_table
from tercet.triton_kernels.log_probabilities import log_probabilities, unpack
from tercet.triton_kernels.logits import (
    add_bias,
    add_bias_reference,
    penalize,
    penalize_reference,
    widen,
    widen_reference,
)
from tercet.triton_kernels.prepare import StepInputs, StepRows, prepare, prepare_reference
from tercet.triton_kernels.sample import sample, sample_reference
from tercet.triton_kernels.slot_table import RECORD_WORDS, SlotTable
from tercet.triton_kernels.write_plan import HEADER_WORDS, RunSizes, write_plan, write_plan_reference, write_small_plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE, DTYPE = "cuda", torch.bfloat16
INTS = torch.int32
PAGE = 64


def on_device(value: SlotTable | StepInputs | StepRows) -> dict[str, Tensor]:
    """Its tensors."""
    found = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: tensor.clone().to(DEVICE) for name, tensor in found.items() if isinstance(tensor, Tensor)}


def check_same(got: SlotTable, wanted: SlotTable) -> None:
    for field in fields(SlotTable):
        assert torch.equal(getattr(got, field.name).cpu(), getattr(wanted, field.name)), field.name


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("num_rows", [0, 3, 99])
def test_a_plan_is_written(num_rows: int, replayed: bool) -> None:
    """The kernel reads it in the host's pinned memory, whatever is there by then."""
    table = random_table(20, 40, PAGE, 5000, 0)
    ours = SlotTable(**on_device(table))
    longest, num_records, base = 2500, 6, 100
    first_record = base + HEADER_WORDS
    records = torch.randint(-9, 2**30, (num_records, RECORD_WORDS), dtype=INTS)
    records[:, 9:12] = torch.rand(num_records, 3).view(INTS)  # temperature, top_p, min_p
    records[:, 12:14] = torch.randint(-(2**31), 2**31 - 1, (num_records, 2), dtype=INTS)  # the seed has no sign
    pairs = random.sample([(slot, index) for slot in range(20) for index in range(40)], 300)
    triples = [(slot, index, random.randrange(1000)) for slot, index in pairs]
    triples += [(20, 0, 5), (-1, 0, 5), (3, 40, 5), (3, -1, 5), (5, 5, 1000), (6, 6, -1)]
    pages = torch.tensor(triples, dtype=INTS).flatten()
    offset = first_record + records.numel() + pages.numel()
    for index, (slot, first, count) in enumerate(
        [(3, 0, 2500), (0, 17, 1), (18, 1025, 1024), (7, 2559, 1), (20, 0, 9), (-1, 0, 9)]
    ):
        records[index, :4] = torch.tensor([slot, first, count, offset])
        offset += count
    words = torch.randint(0, 5000, (offset,), dtype=INTS)
    header = torch.tensor([num_rows, num_records, len(triples), 0], dtype=INTS)
    changes = torch.cat([header, records.flatten(), pages])
    words[base : base + len(changes)] = changes
    sizes = RunSizes(num_rows, base, num_records, longest, len(triples))
    our_rows, rows = torch.zeros(base, dtype=INTS, device=DEVICE), torch.zeros(base, dtype=INTS)
    run = torch.full_like(words, -1).pin_memory()
    if replayed:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            write_small_plan(run, our_rows, base, ours, 1000)  # compiles, and changes nothing
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            write_small_plan(run, our_rows, base, ours, 1000)
            graph.capture_end()
            run.copy_(words)
            graph.replay()
        torch.cuda.synchronize()
    else:
        write_plan(words.pin_memory(), our_rows, sizes, ours, 1000)
    write_plan_reference(words, rows, sizes, table, 1000)
    check_same(ours, table)
    assert torch.equal(our_rows.cpu(), rows)


@pytest.mark.parametrize(("num_decodes", "num_chunks"), [(1, 0), (256, 0), (0, 1), (37, 5), (3, 40)])
def test_prepare(num_decodes: int, num_chunks: int) -> None:
    num_slots, pages_each = 300, 12
    num_pages = num_slots * pages_each + 1
    table = random_table(num_slots, pages_each, PAGE, 150_000, num_decodes)
    slots = random.sample(range(num_slots - 1), num_decodes + num_chunks)
    table.done_S[slots[::5]] = 1
    chunks = []
    for slot in slots[num_decodes:]:
        known = int(table.length_S[slot])
        start = random.randrange(known)
        chunks.append((slot, start, random.choice([known - start, random.randint(1, known - start)])))
    tokens = sum(length for _, _, length in chunks)
    dummy = num_slots - 1
    decodes = slots[:num_decodes] + [dummy] * (3 if num_decodes else 0)
    chunks += [(dummy, 0, 0)] * (2 if num_chunks else 0)
    inputs, rows = empty_step(decodes, chunks, tokens + 70 * bool(num_chunks))
    our_inputs, our_rows = StepInputs(**on_device(inputs)), StepRows(**on_device(rows))
    prepare(our_rows, SlotTable(**on_device(table)), our_inputs, page_size=PAGE, num_pages=num_pages)
    prepare_reference(rows, table, inputs, page_size=PAGE, num_pages=num_pages)
    for field in fields(StepInputs):
        got, wanted = getattr(our_inputs, field.name), getattr(inputs, field.name)
        if not isinstance(wanted, Tensor):
            assert got == wanted
            continue
        got = got.cpu()
        if field.name == "kv_slots_XT":  # padding goes anywhere in page 0
            assert torch.equal(got < PAGE, wanted < PAGE)
            got = torch.where(got < PAGE, 0, got)
            wanted = torch.where(wanted < PAGE, 0, wanted)
        assert torch.equal(got, wanted), field.name
    assert torch.equal(our_rows.positions_R.cpu(), rows.positions_R)


def wide(rows: int, vocab: int) -> Tensor:
    """Random logits in rows that lie apart, with NaN between them."""
    logits = torch.full((rows, vocab + 24), float("nan"), dtype=DTYPE)
    logits[:, :vocab] = torch.randn(rows, vocab) * 4
    return logits


def test_logits() -> None:
    rows, vocab, num_slots = 17, 50_003, 20
    table = random_table(num_slots, 40, PAGE, vocab, 5)
    table.num_prompt_S[:] = torch.randint(1, 1000, (num_slots,), dtype=INTS)
    slots = torch.randperm(num_slots)[:rows].to(INTS)
    slots[3], slots[4] = num_slots, -1
    given = wide(rows, vocab)
    ours = SlotTable(**on_device(table))
    mask = torch.randint(-(2**31), 2**31 - 1, (num_slots, vocab // 32 + 1), dtype=INTS)
    copy = widen(given.to(DEVICE)[:, :vocab], slots.to(DEVICE), mask.to(DEVICE))
    assert torch.equal(copy.cpu(), widen_reference(given[:, :vocab], slots, mask))

    repetition, presence, frequency = torch.rand(num_slots) + 0.5, torch.rand(num_slots), torch.rand(num_slots)
    bias_ids = torch.randint(-3, vocab + 9, (num_slots, 50), dtype=INTS)
    for ids in bias_ids:  # distinct, as the wrapper asks
        ids[: len(ids.unique())] = ids.unique()
        ids[len(ids.unique()) :] = -1
    bias = torch.randn(num_slots, 50) * 9
    logits = wide(rows, vocab)
    wanted, on_gpu = logits[:, :vocab].clone(), logits.to(DEVICE)
    cut = on_gpu[:, :vocab]

    def check() -> None:
        torch.testing.assert_close(cut.cpu().double(), wanted.double(), rtol=1.02 * 2**-7, atol=1e-6)
        wanted.copy_(cut.cpu())

    positions = table.length_S[slots.clamp(0, num_slots - 1).long()]
    numbers = repetition.to(DEVICE), presence.to(DEVICE), frequency.to(DEVICE)
    penalize(cut, slots.to(DEVICE), positions.to(DEVICE), ours, *numbers)
    penalize_reference(wanted, slots, positions, table, repetition, presence, frequency)
    check()
    add_bias(cut, slots.to(DEVICE), bias_ids.to(DEVICE), bias.to(DEVICE))
    add_bias_reference(wanted, slots, bias_ids, bias)
    check()
    assert bool(on_gpu[:, vocab:].isnan().all()), "written between the rows"


def test_log_probabilities() -> None:
    rows, vocab, num_top = 33, 151_936, 5
    logits = wide(rows, vocab)
    exact = logits[:, :vocab].double().log_softmax(1)
    tokens = torch.randint(0, vocab, (rows,), dtype=INTS)
    tokens[:3] = exact[:3].argmax(1).int()
    tokens[3], tokens[4] = vocab, -1
    words = log_probabilities(logits.to(DEVICE)[:, :vocab], tokens.to(DEVICE), num_top)
    chosen, ranks, top_ids, top = unpack(words)
    for row, token in enumerate(tokens.tolist()):
        if 0 <= token < vocab:
            assert abs(float(chosen[row]) - float(exact[row, token])) < 4e-4
            assert int(ranks[row]) == int((logits[row, :vocab] > logits[row, token]).sum()) + 1
        else:
            assert (float(chosen[row]), int(ranks[row])) == (float("-inf"), -1)
    likeliest = exact.sort(dim=1, descending=True, stable=True)
    assert torch.equal(top_ids.cpu().long(), likeliest.indices[:, :num_top])
    torch.testing.assert_close(top.cpu().double(), likeliest.values[:, :num_top], rtol=0, atol=4e-4)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0), (1.0, 8, 1.0, 0.0), (0.8, 0, 0.7, 0.0), (1.1, 12, 0.9, 0.05)],
)
@pytest.mark.parametrize("vocab", [40, 151_936])
def test_frequencies_follow_the_softmax(vocab: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Chi-square over many seeds, of 40 tokens strewn over the vocabulary; the rest is out of reach."""
    draws, likely = 20_000, 40
    places = torch.randperm(vocab)[:likely].sort().values
    values = (torch.randn(likely) * 1.3).to(DTYPE)
    row = torch.full((vocab,), -200.0, dtype=DTYPE)
    row[places] = values
    table = random_table(draws + 1, 1, PAGE, vocab, 1)
    table.length_S[:] = 17
    table.temperature_S[:] = temperature
    table.top_k_S[:], table.top_p_S[:], table.min_p_S[:] = top_k, top_p, min_p
    slots = torch.arange(draws, dtype=INTS)
    tokens = sample(
        row.to(DEVICE).expand(draws, -1), slots.to(DEVICE), torch.full_like(slots, 17).to(DEVICE),
        SlotTable(**on_device(table)),
    ).cpu()  # fmt: skip
    allowed = sorted(plain_allowed(values.tolist(), temperature, top_k, top_p, min_p))
    expected = torch.softmax(values[allowed].double() / temperature, 0) * draws
    counts = torch.bincount(torch.searchsorted(places, tokens.long()), minlength=likely).double()
    assert bool((places[torch.searchsorted(places, tokens.long())] == tokens).all())
    assert int(counts[allowed].sum()) == draws
    assert deviations(counts[allowed].tolist(), expected.tolist()) < 5  # more: once in millions of runs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sample_is_the_reference(dtype: torch.dtype) -> None:
    """Random parameters in each row, stop ids, minimal lengths, padding rows: the same tokens and the same table."""
    rows, vocab = 200, 50_003
    table = random_table(rows + 1, 8, PAGE, vocab, random.randrange(2**31))
    table.length_S[:rows] = table.length_S[:rows].clamp(max=500)
    table.max_length_S[::3] = table.length_S[::3] + 1
    table.temperature_S[:] = torch.rand(rows + 1) * 2
    table.temperature_S[:20] = 0.0
    table.top_k_S[40:] = torch.randint(0, 60, (rows - 39,), dtype=INTS)
    table.top_p_S[60:] = 0.3 + torch.rand(rows - 59)
    table.min_p_S[80:] = torch.rand(rows - 79) * 0.2
    table.min_length_S[::2] = 505
    slots = torch.randperm(rows).to(INTS)
    positions = table.length_S[slots.long()].clone()
    positions[::9] = -1
    logits = (torch.randn(rows, vocab) * 3).to(dtype)
    table.stop_ids_SE[slots.long(), 0] = logits.argmax(1).int()
    ours = SlotTable(**on_device(table))
    got = sample(logits.to(DEVICE), slots.to(DEVICE), positions.to(DEVICE), ours)
    assert got.tolist() == sample_reference(logits, slots, positions, table).tolist()
    check_same(ours, table)
    assert int(table.done_S[:rows].sum()) > 10
