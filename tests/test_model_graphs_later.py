"""Which steps have a graph when: some from the start, others when they first run or in a lull; all compute the same."""

import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from tercet.model import graphs as graphs_module
from tercet.model.graphs import StepGraphs
from tercet.model.padded_shapes import Shapes
from tercet.model.step_shape import StepShape

SHAPES = [StepShape(rows, 0, 0) for rows in (16, 8, 4, 2, 1)]
FIRST, LATER = SHAPES[:2], SHAPES[2:]


class Recording:
    """In place of a CUDA graph where there is no GPU: what is called while it captures, its replays call again."""

    capturing: list[int] | None = None

    def __init__(self) -> None:
        self.calls: list[int] = []

    def capture_begin(self, **_: object) -> None:
        Recording.capturing = self.calls

    def capture_end(self) -> None:
        Recording.capturing = None

    def replay(self) -> None:
        for rows in self.calls:
            Steps.count[:rows] += 1


class NoStream:
    def synchronize(self) -> None:
        pass


class Steps:
    """Steps that count their rows."""

    count = torch.zeros(16, dtype=torch.int32)

    def __init__(self) -> None:
        self.launched: list[int] = []
        """Rows of each step that was launched kernel by kernel, which capturing is too."""
        self.no_memory_for = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        Steps.count = torch.zeros_like(Steps.count)

    def __call__(self, shape: StepShape) -> None:
        assert self.may_go_on.wait(10)
        self.launched.append(shape.num_decodes)
        on_gpu = Steps.count.is_cuda and torch.cuda.is_current_stream_capturing()
        if (on_gpu or Recording.capturing is not None) and shape.num_decodes == self.no_memory_for:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if Recording.capturing is not None:
            Recording.capturing.append(shape.num_decodes)
        else:
            Steps.count[: shape.num_decodes] += 1

    def wait_for(self, graphs: StepGraphs) -> None:
        """Until what is captured beside steps is there."""
        aside = graphs._aside
        assert aside is not None
        aside.join(10)
        assert not aside.is_alive()

    def check(self, graphs: StepGraphs, shape: StepShape) -> None:
        """A step of this shape adds one to as many rows as it has."""
        before = Steps.count.clone()
        graphs.run(shape)
        wanted = before + (torch.arange(16, device=before.device) < shape.num_decodes)
        assert torch.equal(Steps.count, wanted.int())


@pytest.fixture(params=["recorded", pytest.param("cuda", marks=pytest.mark.gpu)])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    if request.param == "recorded":
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        monkeypatch.setattr(torch.cuda, "Stream", NoStream)
        monkeypatch.setattr(torch.cuda, "stream", nullcontext)
        monkeypatch.setattr(graphs_module, "_upload", lambda graph: None)
        yield Steps()
        return
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(Steps, "count", Steps.count.cuda())
    with torch.cuda.stream(torch.cuda.Stream()):
        yield Steps()


def test_those_from_the_start_are_replayed(steps: Steps) -> None:
    graphs, told = StepGraphs(steps), list[tuple[int, int]]()
    graphs.capture(FIRST, lambda done, total: told.append((done, total)))
    assert told == [(0, 2), (1, 2), (2, 2)]
    assert steps.launched == [16, 8]
    for shape in FIRST * 2:
        steps.check(graphs, shape)
    assert steps.launched == [16, 8]
    assert not graphs.capture_one()


def test_others_are_captured_once_when_they_first_run(steps: Steps) -> None:
    graphs = StepGraphs(steps)
    graphs.capture(FIRST)
    graphs.capture_later(SHAPES)
    for shape in (LATER[1], FIRST[0], LATER[1], LATER[0], LATER[1]):
        steps.check(graphs, shape)
    assert steps.launched == [16, 8, 2, 4]


def test_others_are_captured_in_lulls_in_their_order(steps: Steps) -> None:
    graphs = StepGraphs(steps)
    graphs.capture(FIRST)
    graphs.capture_later(SHAPES)
    steps.check(graphs, LATER[1])
    assert [graphs.capture_one() for _ in range(4)] == [True, True, False, False]
    assert steps.launched == [16, 8, 2, 4, 1]
    for shape in SHAPES:
        steps.check(graphs, shape)
    assert steps.launched == [16, 8, 2, 4, 1]


def test_a_shape_that_is_not_to_have_one_is_launched(steps: Steps) -> None:
    graphs = StepGraphs(steps)
    graphs.capture(FIRST)
    graphs.capture_later(LATER[:1])
    for _ in range(2):
        steps.check(graphs, LATER[2])
    assert steps.launched == [16, 8, 1, 1]


def test_what_can_have_one_gets_it_at_its_first_step(steps: Steps) -> None:
    graphs = StepGraphs(steps)
    graphs.capture(FIRST)
    graphs.capture_later(LATER[:1], lambda shape: shape == LATER[2])
    for shape in LATER[1:] * 3:
        steps.check(graphs, shape)
    assert steps.launched == [16, 8, 2, 1, 2, 2]
    assert graphs.capture_one()
    assert not graphs.capture_one()


def test_without_memory_for_what_can_have_one_it_is_not_tried_again(
    steps: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    graphs = StepGraphs(steps)
    graphs.capture_later((), lambda shape: True)
    steps.no_memory_for = LATER[0].num_decodes
    for _ in range(5):
        steps.check(graphs, LATER[0])
    assert capsys.readouterr().err.count("without a CUDA graph") == 1
    assert not graphs.capture_one()


def test_without_memory_for_a_graph_steps_go_on(steps: Steps, capsys: pytest.CaptureFixture[str]) -> None:
    graphs = StepGraphs(steps)
    graphs.capture(FIRST)
    graphs.capture_later(LATER)
    steps.no_memory_for = LATER[1].num_decodes
    steps.check(graphs, LATER[1])
    assert "without a CUDA graph: CUDA out of memory" in capsys.readouterr().err
    assert not graphs.capture_one(), "others would not fit either"
    for shape in SHAPES * 2:
        steps.check(graphs, shape)
    steps.no_memory_for = FIRST[0].num_decodes
    with pytest.raises(torch.OutOfMemoryError):  # a start says what it lacks
        StepGraphs(steps).capture(FIRST)


def test_a_larger_one_stands_in_until_a_shape_is_common(steps: Steps) -> None:
    graphs = StepGraphs(steps)
    assert graphs.shape_to_run(LATER[0], FIRST[:1]) == LATER[0], "without graphs each runs as itself"
    graphs.capture(FIRST)
    graphs.capture_later(SHAPES)
    rare, common = LATER[:2]
    assert graphs.shape_to_run(FIRST[1], FIRST[:1]) == FIRST[1]
    assert graphs.shape_to_run(common, []) == common
    for _ in range(4):
        assert graphs.shape_to_run(common, FIRST[:1]) == FIRST[0]
    assert graphs._aside is None
    steps.may_go_on.clear()
    assert graphs.shape_to_run(common, FIRST[:1]) == FIRST[0], "it is captured meanwhile"
    for _ in range(20):
        assert graphs.shape_to_run(common, FIRST[:1]) == FIRST[0]
        assert graphs.shape_to_run(rare, FIRST[:1]) == FIRST[0], "no two at a time"
    steps.may_go_on.set()
    steps.wait_for(graphs)
    assert graphs.shape_to_run(common, FIRST[:1]) == common
    steps.check(graphs, common)
    assert graphs.shape_to_run(rare, FIRST[:1]) == FIRST[0]
    assert graphs.capture_one(), "there was a lull, and this was begun"
    assert graphs.shape_to_run(rare, FIRST[:1]) == rare
    for shape in (common, rare):
        steps.check(graphs, shape)


def test_without_memory_for_what_another_stands_in_for_it_does_for_ever(
    steps: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    graphs = StepGraphs(steps)
    graphs.capture(FIRST)
    graphs.capture_later(LATER)
    steps.no_memory_for = LATER[2].num_decodes
    for _ in range(6):
        assert graphs.shape_to_run(LATER[2], FIRST[:1]) == FIRST[0]
    steps.wait_for(graphs)
    assert "without a CUDA graph: CUDA out of memory" in capsys.readouterr().err
    for _ in range(20):
        assert graphs.shape_to_run(LATER[2], FIRST[:1]) == FIRST[0]
    assert not graphs.capture_one()
    steps.check(graphs, FIRST[0])


def test_steps_go_on_while_one_is_captured(steps: Steps) -> None:
    """Its graph is right all the same, and who needs one at once waits for it."""
    graphs = StepGraphs(steps)
    graphs.capture(FIRST)
    graphs.capture_later(LATER)
    for _ in range(6):
        graphs.shape_to_run(LATER[0], FIRST[:1])
    while Steps.count.is_cuda and LATER[0] not in graphs._graphs:
        for shape in FIRST:
            steps.check(graphs, shape)
    for shape in (LATER[1], LATER[0], LATER[2]):
        steps.check(graphs, shape)
    assert sorted(steps.launched) == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(512, 16384), (256, 8192), (37, 5000), (1, 64)])
def test_what_stands_in_holds_every_step_that_it_stands_in_for(max_num_seqs: int, budget: int) -> None:
    shapes = Shapes(max_num_seqs, budget, most_deep={2048: 256, 12_288: 512})
    for shape in shapes.for_graphs():
        stand_ins = shapes.stand_ins(shape)
        if not shape.num_chunks:
            assert not stand_ins, "a row's bits depend on who else is there"
            continue
        assert stand_ins[-1] == shapes.for_start()[0]
        less_deep = [2048] if shape.deep > 2048 and shape.num_prefill_tokens <= 256 else []
        assert stand_ins[:-1] == [shape._replace(deep=deep) for deep in (*less_deep, *([0] if shape.deep else []))]
        for stand_in in stand_ins:
            assert all(stand_in[i] >= shape[i] for i in range(3))
            assert (stand_in.whole_logits, stand_in.longest) == (shape.whole_logits, shape.longest)
        assert not shapes.stand_ins(shape._replace(logged=True))


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(512, 16384), (256, 8192), (1, 64)])
def test_a_start_has_the_largest_and_what_first_requests_meet(max_num_seqs: int, budget: int) -> None:
    shapes = Shapes(max_num_seqs, budget)
    first, every = shapes.for_start(), shapes.for_graphs()
    assert first[0] == every[0], "graphs share memory: the largest is first"
    assert set(first) <= set(every)
    assert len(first) == len(set(first)) < len(every)
    for num_tokens in (1, 70, budget):
        assert shapes.fit(0, 1, min(num_tokens, budget)) in first
    for num_decodes in range(1, max_num_seqs + 1):
        shape = shapes.fit(num_decodes, 0, 0)
        assert {shapes.of_length(shape, length) for length in (1, 100_000)} <= set(first)
