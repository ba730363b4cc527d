"""Page tables of layers with windows: what they have left behind serves others, and nobody sees a difference.

Random loads against a worker that checks every key and value within windows; what a pool has room for; who finds what.
"""

import random
from collections import Counter

import numpy as np
import pytest

from simulated_worker import VOCABULARY, undisturbed
from tercet.engine import page_need
from tercet.engine.page_need import PageNeed
from tercet.engine.planner_settings import PlannerSettings
from tercet.ipc.step_messages import Abort, Submit, Unservable
from test_engine_planner import Run, random_speculation, settings, submit
from test_engine_planner_families import several, singles
from test_engine_planner_images import IMAGE, showing
from window_worker import WindowWorker

MOST_TOKENS = 44
WINDOWS = ((0, 5), (0, 5, 5, 5), (7, 7), (0, 0, 3), (0, 12, 5))


@pytest.fixture(autouse=True)
def short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of attention, so that short requests leave pages behind."""
    monkeypatch.setattr(page_need, "KEYS_AT_ONCE", 2)


class WindowRun(Run):
    def __init__(self, chosen: PlannerSettings) -> None:
        super().__init__(chosen)
        self.worker: WindowWorker = WindowWorker(chosen)


def sizes(draw: random.Random, *, sees: bool) -> PlannerSettings:
    """Pages for one of the longest, and some more or none."""
    windows, page_size = draw.choice(WINDOWS), draw.choice([2, 4])
    num_seqs, at_once = draw.choice([1, 3, 8]), IMAGE if sees else 1
    speculation = random_speculation(draw)
    least = PageNeed(windows, page_size, at_once).all_held(-(-MOST_TOKENS // page_size))
    return settings(
        windows=windows,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs + at_once + draw.choice([0, 9, 50]),
        num_pages=1 + least + draw.choice([0, 2, 9, 40]) * len(windows),
        page_size=page_size,
        run_ahead=draw.randint(1, 3),
        max_lease=draw.choice([1, 2, 8]),
        max_model_len=MOST_TOKENS,
        enable_prefix_caching=draw.random() < 0.8,
        deterministic=draw.random() < 0.4,
        image_tokens=IMAGE if sees else 0,
        # Where no layer sees all, it takes a guesser for plans to bring tokens whose keys are there.
        speculation=speculation if 0 not in windows else draw.choice([None, speculation]),
    )


def random_request(draw: random.Random, number: int, stems: list[list[list[int] | int]]) -> Submit:
    """Few beginnings, some with an image, and a few words; several answers, if it has no image."""
    parts = [*draw.choice(stems), [draw.randrange(VOCABULARY) for _ in range(draw.choice([0, 0, 1, 3]))]]
    said = {
        "seed": draw.randrange(3),
        "max_tokens": draw.randint(1, 14),
        "stops": [draw.randrange(VOCABULARY) for _ in range(draw.choice([0, 0, 2]))],
    }
    if any(isinstance(part, int) for part in parts):
        return showing(number, parts, **said)
    prompt = [token for part in parts if not isinstance(part, int) for token in part]
    return several(number, prompt or [1], draw.choice([1, 1, 3]), salt=draw.choice(["", "", "other"]), **said)


def random_load(seed: int) -> Counter[str]:
    draw = random.Random(seed)
    sees = draw.random() < 0.3
    run = WindowRun(sizes(draw, sees=sees))
    words = [[draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 22))] for _ in range(3)]
    stems: list[list[list[int] | int]] = [[one] for one in words]
    if sees:
        stems += [[words[0][:6], 1, [7]], [2, words[1][:5], 1]]
    waiting = [random_request(draw, 4 * number, stems) for number in range(25)]
    want = {number: said for request in waiting for number, said in singles(request).items()}
    aborted: set[int] = set()
    sent: list[int] = []
    while waiting or not run.planner.idle:
        action = draw.random()
        if waiting and action < 0.25:
            request = waiting.pop(0)
            assert run.planner.submit(request, 0.0) is None
            sent += singles(request)
        elif action < 0.28 and sent:
            if (number := draw.choice(sent)) not in run.ended:
                aborted.add(number)
            run.planner.abort(Abort(np.array([number], np.int64).tobytes()))
        elif action < 0.65:
            run.plan()
        elif run.worker.in_flight:
            run.execute()
    run.finish()
    for number, tokens in want.items():
        assert run.said[number] == (tokens[: len(run.said[number])] if number in aborted else tokens)
    load = run.planner.load()
    run.worker.counts |= {"preempted": load.num_preemptions, "hits": load.num_prefix_hits}
    return run.worker.counts


def test_random_loads_say_what_undisturbed_requests_say() -> None:
    counts = sum((random_load(seed) for seed in range(60)), Counter[str]())
    assert all(counts[kind] > 50 for kind in ("left behind", "preempted", "hits", "copied")), counts


def ask(run: Run, number: int, prompt: list[int], **sampling: object) -> int:
    """How many of its tokens were cached."""
    run.planner.submit(submit(number, prompt, **sampling), 0.0)
    run.finish()
    assert run.said[number] == undisturbed(prompt, submit(number, prompt, **sampling).sampling)
    return run.ended[number].usage.num_cached_tokens


def test_windows_take_no_more_than_they_see() -> None:
    """40 tokens are ten pages of a table of 4 tokens each; a window of 8 sees 2, and those on its edges."""
    need = PageNeed((0, 8), 4, 1)
    assert [need.held(0, 10), need.held(8, 10), need.held(8, 2), need.all_held(10)] == [10, 5, 2, 15]
    assert [need.most_tokens(num_pages, 400) for num_pages in (0, 1, 2, 15, 16)] == [0, 0, 4, 40, 44]
    assert PageNeed((8,), 4, 1).most_tokens(5, 400) == 400
    run = WindowRun(settings(windows=(0, 8), num_pages=16, max_model_len=100))
    assert ask(run, 1, list(range(30)), max_tokens=11) == 0
    refusal = run.planner.submit(submit(2, list(range(30)), max_tokens=12), 0.0)
    assert isinstance(refusal, Unservable)
    assert "41" in refusal.message
    assert "40" in refusal.message


def test_who_goes_on_from_a_prompt_finds_what_its_windows_see() -> None:
    run = WindowRun(settings(windows=(0, 8), num_pages=100))
    turn = list(range(21))
    assert ask(run, 1, turn) == 0
    assert ask(run, 2, [*turn, 3]) == 20
    assert ask(run, 3, turn[:8]) == 4  # the last one is always computed


def test_what_windows_left_behind_goes_first_unless_others_part_there() -> None:
    """A beginning that several share is found although its window has gone on, as soon as two had it."""
    run = WindowRun(settings(windows=(0, 4, 4, 4), num_pages=102, max_model_len=100))
    shared = list(range(40, 48)) * 2

    def crowd(first: int) -> None:
        for number in range(first, first + 3):
            ask(run, number, [number] * 24, max_tokens=1)

    assert ask(run, 1, [*shared, *[1] * 20], max_tokens=1) == 0
    crowd(10)
    assert ask(run, 2, [*shared, *[2] * 20], max_tokens=1) == 0  # what it would see is gone
    crowd(20)
    assert ask(run, 3, [*shared, *[3] * 20], max_tokens=1) == 16
