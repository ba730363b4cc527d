"""The sizes that steps are padded to: one for every step, a graph for each, and which an engine starts with."""

import itertools

import pytest
import torch

from tercet.model.padded_shapes import Shapes
from tercet.model.runner_settings import GuessSettings
from tercet.model.trial_shapes import TrialShapes
from tercet.triton_kernels.fused_decode import LONG
from tercet.triton_kernels.tuning import ROW_BUCKETS


def test_there_are_graphs_for_both_ways_to_sample() -> None:
    shapes = Shapes(16, 1024)
    for num_decodes in (1, 3, 16):
        drawn, whole = (shapes.of_length(shapes.fit(num_decodes, 0, 0, whole), 9) for whole in (False, True))
        assert drawn == whole._replace(whole_logits=False) != whole
        assert {drawn, whole} <= set(shapes.for_graphs())
    # Beside prefill there is one way.
    assert shapes.fit(3, 1, 50) == shapes.fit(3, 1, 50, True)
    assert shapes.fit(3, 1, 50) in shapes.for_graphs()
    assert all(shape.whole_logits for shape in shapes.for_warm_up())


def test_few_short_rows_have_graphs_for_their_length() -> None:
    """A row alone by its length alone, whatever else its plan says; many rows have one graph for any length."""
    shapes = Shapes(16, 1024)
    graphs = set(shapes.for_graphs())
    alone = [(1, 512), (512, 512), (513, 768), (1000, 1024), (1025, 2048), (2048, 2048)]
    alone += [(2049, 12_288), (12_288, 12_288), (12_289, LONG), (100_000, LONG)]
    pairs = [(2, 512), (512, 512), (513, 1024), (1025, 1536), (1537, 0)]
    for num_decodes, lengths in ((1, alone), (2, pairs), (3, [(512, 512), (513, 0)]), (5, [(5, 0)]), (16, [(17, 0)])):
        kinds = [(False,), (True,), (False, True), (False, False, True), (True, True, True)]
        for kind in kinds:
            fitted = shapes.fit(num_decodes, 0, 0, *kind)
            for length, longest in lengths:
                shape = shapes.of_length(fitted, length)
                assert shape == fitted._replace(longest=longest)
                assert shape in graphs
    for shape in (shapes.fit(1, 1, 50), shapes.fit(0, 1, 50), shapes.fit(0, 1, 50, adjusted=True)):
        assert shapes.of_length(shape, 5) == shape


def test_few_short_slots_with_guesses_have_graphs_for_their_length() -> None:
    trials = TrialShapes(GuessSettings(num_guesses=3, looked_up=(1, 4), most_slots=16))
    shapes = Shapes(16, 1024, trials=trials)
    graphs = set(shapes.for_graphs())
    alone = [(1, 768), (769, 1536), (1537, 16_384), (16_385, LONG)]
    four = [(768, 768), (769, 4096), (4097, LONG)]
    eight = [(5, 1536), (1537, LONG)]
    for num_slots, lengths in ((1, alone), (3, four), (4, four), (5, eight), (16, [(5000, 0)])):
        for whole_logits in (False, True):
            fitted = trials.fit(num_slots, whole_logits)
            for length, longest in lengths:
                shape = shapes.of_length(fitted, length)
                assert shape == fitted._replace(longest=longest)
                assert shape in graphs
    few = TrialShapes(GuessSettings(num_guesses=3, looked_up=(1, 4), most_slots=3))
    assert Shapes(3, 1024, trials=few).of_length(few.fit(3), 5000).longest == LONG, "as of four"
    large = Shapes(16, 1024, short_trials=1, trials=trials)
    assert {shape.longest for shape in large.for_graphs() if shape.num_trials == 1} == {768, 1536, 8192, LONG}
    assert {shape.longest for shape in large.for_graphs() if shape.num_trials == 4} == {2048, LONG}
    assert {shape.longest for shape in large.for_graphs() if shape.num_trials == 8} == {1024, LONG}
    without = Shapes(16, 1024, short_trials=0, trials=trials)
    assert not any(shape.longest for shape in without.for_graphs() if shape.num_trials)
    assert without.of_length(trials.fit(1), 5) == trials.fit(1)


def test_no_graphs_for_lengths_that_make_no_difference() -> None:
    shapes = Shapes(16, 1024, short_rows=0)
    assert not any(shape.longest for shape in shapes.for_graphs())
    alone = shapes.fit(1, 0, 0)
    assert shapes.of_length(alone, 5) == alone
    large = Shapes(16, 1024, short_rows=1)
    assert {shape.num_decodes for shape in large.for_graphs() if shape.longest} == {1}
    assert large.of_length(alone, 2049) == alone, "any length"


def test_few_rows_may_be_padded_to_more() -> None:
    for max_num_seqs in (4, 16):
        shapes = Shapes(max_num_seqs, 1024, fewest_rows=8)
        graphs = shapes.for_graphs()
        fitted = {rows: shapes.fit(rows, 0, 0).num_decodes for rows in range(1, max_num_seqs + 1)}
        assert fitted == {1: 1, **{rows: 8 if rows <= 8 else 16 for rows in range(2, max_num_seqs + 1)}}
        assert {shape.num_decodes for shape in graphs if not shape.num_chunks} == set(fitted.values())
        assert shapes.max_decodes == fitted[max_num_seqs]


def test_few_tokens_behind_many_have_graphs() -> None:
    shapes = Shapes(16, 1024, most_deep={2048: 256, 12_288: 512})
    sizes = ((0, 1, 1), (0, 8, 256), (3, 2, 70), (0, 1, 257), (0, 1, 513), (0, 9, 70))
    for (num_decodes, num_chunks, num_tokens), depth in itertools.product(sizes, (2047, 2048, 12_287, 12_288, 100_000)):
        shallow = shapes.fit(num_decodes, num_chunks, num_tokens)
        fitted = shapes.fit(num_decodes, num_chunks, num_tokens, depth=depth)
        assert shallow == fitted._replace(deep=0)
        deep = 2048 if depth >= 2048 and num_tokens <= 256 else 0
        deep = 12_288 if depth >= 12_288 and num_tokens <= 512 else deep
        assert fitted.deep == (deep if num_chunks <= 8 else 0)
        assert fitted in shapes.for_graphs()
        assert fitted in shapes.for_lulls()
        assert fitted in shapes.plain(), "ranks, which have no lulls, have it from the start"
        assert fitted in shapes.for_compilers()
        first = not num_decodes and fitted.deep < 12_288
        assert (fitted in shapes.for_start()) == first, "a chat's next turn is among the first requests"
    assert shapes.fit(0, 1, 70, logged=True, depth=5000).deep == 2048
    assert not shapes.fit(0, 1, 70, of_prompts=True, depth=5000).deep
    assert not any(shape.deep for shape in Shapes(16, 1024).for_graphs())
    assert not Shapes(16, 1024).fit(0, 1, 70, depth=5000).deep


def test_a_start_has_what_stands_in_for_prompts_though_steps_with_guesses_are_longer() -> None:
    trials = TrialShapes(GuessSettings(num_guesses=15, looked_up=(1, 4), most_slots=64))
    shapes = Shapes(64, 512, trials=trials)
    first = shapes.for_start()
    assert first[0] == shapes.for_graphs()[0] == trials.fit(64), "graphs share memory: the largest is first"
    assert shapes.stand_ins(shapes.fit(0, 1, 70))[-1] in first


def test_long_prompts_are_as_long_beside_decodes() -> None:
    """A product of q, k, v that fills its tiles ends in attention's prologue: with some rows more it would not."""
    shapes = Shapes(512, 16384)
    for num_tokens in (700, 1024, 2048, 16384):
        for num_chunks in (1, 40):
            alone, beside = (shapes.fit(num_decodes, num_chunks, num_tokens) for num_decodes in (0, 3))
            assert beside.num_prefill_tokens == alone.num_prefill_tokens


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(256, 8192), (1, 16), (3, 64), (37, 5000), (512, 16384)])
def test_shapes_hold_every_step(max_num_seqs: int, budget: int) -> None:
    shapes = Shapes(max_num_seqs, budget)
    graphs = shapes.for_graphs()
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    assert len(graphs) == len(set(graphs))
    assert {shapes.of_length(shapes.fit(n, 0, 0), 9) for n in range(1, max_num_seqs + 1)} <= set(graphs)
    for adjusted, logged in ((True, False), (False, True), (True, True)):
        for n in range(1, max_num_seqs + 1):
            shape = shapes.of_length(shapes.fit(n, 0, 0, adjusted=adjusted, logged=logged), 9)
            assert shape in graphs
            assert (shape.whole_logits, shape.adjusted, shape.logged) == (True, adjusted, logged)
    totals = {graph: graph.num_decodes + graph.num_prefill_tokens for graph in graphs}
    assert totals[graphs[0]] == max(totals.values()), "graphs share memory: the largest is first"
    few = [total for graph, total in totals.items() if graph.num_prefill_tokens < 1024]
    assert all(total in ROW_BUCKETS or total % 128 == 0 for total in few), "tiles of products are full"
    for _ in range(500):
        num_chunks = draw(0, max_num_seqs)
        num_decodes = draw(0 if num_chunks else 1, max_num_seqs - num_chunks)
        num_tokens = draw(num_chunks, max(num_chunks, budget - num_decodes)) if num_chunks else 0
        shape = shapes.fit(num_decodes, num_chunks, num_tokens)
        assert shape.num_decodes >= num_decodes
        assert shape.num_chunks >= num_chunks
        assert shape.num_prefill_tokens >= num_tokens
        assert shape.num_decodes + shape.num_chunks <= shapes.max_rows
        assert shape.num_decodes + shape.num_prefill_tokens <= shapes.max_tokens
