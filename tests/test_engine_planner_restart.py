"""The planner when workers die: everything runs again and says the same, and what killed them is found out."""

import random

import numpy as np
import pytest

from simulated_worker import VOCABULARY, SimulatedWorker, undisturbed
from tercet.engine.planner_settings import PlannerSettings
from tercet.ipc.process_messages import Limits, WorkersRestarted
from tercet.ipc.step_messages import Abort, Forget, Sampled, Submit, Unservable
from test_engine_planner import Run, random_speculation, settings, submit


def restart(run: Run, blame: str | None = None, num_pages: int | None = None, *, now: float = 0.0) -> list[Unservable]:
    """New workers, that know nothing."""
    chosen = run.settings
    num_pages = num_pages or chosen.num_pages
    run.worker = SimulatedWorker(chosen.max_num_seqs, num_pages, chosen.page_size, chosen.max_num_batched_tokens)
    host = {"num_host_pages": chosen.num_host_pages, "num_host_states": chosen.num_host_states}
    limits = Limits(num_pages, chosen.max_model_len, VOCABULARY, "float32", "cpu", 8, **host)
    return run.planner.restart(WorkersRestarted(run.planner.epoch + 1, limits, blame), now)


def run_to_the_end(run: Run) -> None:
    """With as many pages as there are now."""
    while not run.planner.idle:
        run.plan()
        if run.worker.in_flight:
            run.execute()


def prompt_of(message: Submit) -> list[int]:
    return np.frombuffer(message.prompt_ids, np.int32).tolist()


@pytest.mark.parametrize("seed", range(30))
def test_all_is_said_once_however_often_workers_die(seed: int) -> None:
    draw = random.Random(seed)
    run = Run(
        settings(
            num_pages=draw.choice([26, 40]), max_num_seqs=draw.choice([2, 5]), max_model_len=44,
            speculation=draw.choice([None, random_speculation(draw)]),
        )
    )  # fmt: skip
    requests = [
        submit(
            number,
            [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 20))],
            seed=draw.randrange(3),
            max_tokens=draw.randint(1, 18),
            stops=[draw.randrange(VOCABULARY) for _ in range(draw.choice([0, 2]))],
        )
        for number in range(15)
    ]
    waiting, deaths = list(requests), 0
    while waiting or not run.planner.idle:
        action = draw.random()
        if waiting and action < 0.2:
            assert run.planner.submit(waiting.pop(0), 0.0) is None
        elif action < 0.25 and deaths < 20:
            deaths += 1
            assert restart(run) == []
        elif action < 0.6:
            run.plan()
        elif run.worker.in_flight:
            run.execute()
    run.finish()
    for request in requests:
        assert run.said[request.number] == undisturbed(prompt_of(request), request.sampling)
        assert run.ended[request.number].usage.num_generated_tokens == len(run.said[request.number])


class Poisoned(SimulatedWorker):
    """Dies of a certain token of the request with a certain seed; earlier ones that are on their way may be lost."""

    def __init__(self, chosen: PlannerSettings, seed: int, position: int, *, loses: bool) -> None:
        super().__init__(chosen.max_num_seqs, chosen.num_pages, chosen.page_size, chosen.max_num_batched_tokens)
        self._seed, self._position, self._loses = seed, position, loses

    def execute(self) -> Sampled:
        sampled = super().execute()
        for index, slot in self._slots.items():
            if slot.sampling.seed == self._seed:
                last = slot.num_prompt + self._position
                if len(slot.tokens) > last or (self._loses and self._occupied[index].num_planned >= last):
                    raise SystemError
        return sampled


@pytest.mark.parametrize("seed", range(20))
def test_the_poison_is_found_and_the_others_go_on(seed: int) -> None:
    """One request kills the workers whenever they come to its n-th token, while later ones are planned already."""
    draw = random.Random(seed)
    caching, deterministic = draw.random() < 0.5, draw.random() < 0.5
    run = Run(
        settings(
            max_num_seqs=4,
            run_ahead=draw.randint(1, 4),
            max_lease=draw.choice([1, 4]),
            enable_prefix_caching=caching,
            deterministic=deterministic,
        )
    )
    num = draw.choice([4, 8])  # as many as fit: then leases are long
    requests = [submit(number, [number, 9], seed=number, max_tokens=draw.randint(12, 20)) for number in range(num)]
    poison, position, loses = draw.randrange(num), draw.randint(0, 9), draw.random() < 0.5
    run.worker = Poisoned(run.settings, poison, position, loses=loses)
    for request in requests:
        run.planner.submit(request, 0.0)
    failed: list[Unservable] = []
    deaths = 0
    while run.plan() or run.worker.in_flight:
        while run.plan():
            pass
        try:
            run.execute()
        except SystemError:
            deaths += 1
            failed += restart(run, "worker 0 was killed by SIGSEGV")
            run.worker = Poisoned(run.settings, poison, position, loses=loses)
    assert deaths == 2
    assert [one.number for one in failed] == [poison]
    assert "worker 0 was killed by SIGSEGV" in failed[0].message
    for request in requests:
        want = undisturbed(prompt_of(request), request.sampling)
        if request.number == poison:
            assert run.said[poison] == want[: len(run.said[poison])]
            assert poison not in run.ended
        else:
            assert run.said[request.number] == want
    assert run.planner.idle


def test_deaths_that_nobody_is_to_blame_for_fail_nobody() -> None:
    run = Run(settings())
    request = submit(1, [1, 2, 3], max_tokens=5)
    run.planner.submit(request, 0.0)
    for _ in range(10):
        run.plan()
        assert restart(run) == []
    run.finish()
    assert run.said[1] == undisturbed([1, 2, 3], request.sampling)


@pytest.mark.parametrize("go", [Abort(np.array([1], np.int64).tobytes()), Forget(2)])
@pytest.mark.parametrize("num_executed", [0, 1])
def test_who_never_ran_is_not_to_blame_for_a_suspect_that_left(go: Abort | Forget, num_executed: int) -> None:
    """Workers die of the first suspect a second time, while it leaves: no other is suspected or failed for that."""
    run = Run(settings(run_ahead=4, max_lease=1))
    requests = [submit(number, [number, 9], seed=number, max_tokens=9) for number in range(1, 4)]
    for request in requests[:2]:
        run.planner.submit(request, 0.0)
    run.plan()
    run.plan()
    assert restart(run, "worker 0 was killed by SIGSEGV") == []  # both ran: both are suspects
    run.planner.submit(requests[2], 0.0)
    run.plan()
    run.plan()
    for _ in range(num_executed):
        run.execute()
    if isinstance(go, Abort):
        run.planner.abort(go)
    else:
        run.planner.forget(go)
    assert not run.plan(), "another enters while what is planned of the suspect is not over"
    assert restart(run, "worker 0 was killed by SIGSEGV") == []
    run.plan()
    assert run.planner.load().num_running == 1, "the second suspect runs alone, as before"
    run.finish()
    assert all(run.said[number] == undisturbed([number, 9], requests[number - 1].sampling) for number in (2, 3))


def test_after_a_suspect_that_left_the_next_has_its_turn() -> None:
    """Its plans are over, and the workers live: the next death is another's."""
    run = Run(settings(max_lease=1))
    for number in range(1, 3):
        run.planner.submit(submit(number, [number, 9], seed=number, max_tokens=9), 0.0)
    run.plan()
    restart(run, "worker 0 was killed by SIGSEGV")
    run.plan()
    run.planner.abort(Abort(np.array([1], np.int64).tobytes()))
    run.execute()
    run.plan()
    (failed,) = restart(run, "worker 0 was killed by SIGSEGV")
    assert (failed.number, failed.code) == (2, "kills_workers")


def test_fewer_pages_than_before() -> None:
    run = Run(settings())
    run.planner.submit(submit(1, [1] * 30, max_tokens=30), 0.0)
    run.planner.submit(submit(2, [1] * 5, max_tokens=3), 0.0)
    run.plan()
    (failed,) = restart(run, num_pages=6)
    assert (failed.number, failed.code) == (1, "too_long_for_cache")
    assert "want at most 20" in failed.message
    run_to_the_end(run)
    assert len(run.said[2]) == 3
    assert run.planner.load().num_free_pages == 5


@pytest.mark.parametrize("num_said", [0, 7, 13])
def test_what_was_to_take_all_room_takes_what_fewer_pages_leave(num_said: int) -> None:
    """Five pages of four tokens: prompts of six leave room for 14, and the last token takes none."""
    run = Run(settings(enable_prefix_caching=False))
    messages = [
        submit(1, [1] * 6, max_tokens=38, open_ended=True),
        submit(2, [2] * 6, max_tokens=38),
        submit(3, [3] * 6, max_tokens=9, open_ended=True),
        submit(4, [4] * 6, max_tokens=38, min_tokens=16, open_ended=True),
    ]
    for message in messages:
        assert run.planner.submit(message, 0.0) is None
    while len(run.said[1]) < num_said:
        run.plan()
        run.execute()
    failed = restart(run, num_pages=6)
    assert {(one.number, one.code) for one in failed} == {(2, "too_long_for_cache"), (4, "too_long_for_cache")}
    run_to_the_end(run)
    assert run.said[1] == undisturbed([1] * 6, messages[0].sampling)[:15]
    assert (run.ended[1].reason, run.ended[1].usage.num_generated_tokens) == ("length", 15)
    assert run.said[3] == undisturbed([3] * 6, messages[2].sampling)
    assert run.planner.load().num_free_pages == 5


def test_what_has_more_tokens_than_fewer_pages_hold_is_refused() -> None:
    run = Run(settings(enable_prefix_caching=False))
    run.planner.submit(submit(1, [1] * 6, max_tokens=38, open_ended=True), 0.0)
    while len(run.said[1]) < 15:
        run.plan()
        run.execute()
    (failed,) = restart(run, num_pages=6)
    assert (failed.number, failed.code) == (1, "too_long_for_cache")
    assert run.planner.idle


def test_late_news_of_fewer_pages_refuses_no_open_end() -> None:
    """The tokenizer may not know yet how many pages there are."""
    run = Run(settings())
    restart(run, num_pages=6)
    run.planner.submit(submit(1, [1] * 6, max_tokens=38, open_ended=True), 0.0)
    run_to_the_end(run)
    assert run.said[1] == undisturbed([1] * 6, submit(1, [1] * 6, max_tokens=15).sampling)


@pytest.mark.parametrize("num_generated", [0, 1, 6])
def test_a_request_that_goes_on_in_a_new_scheduler(num_generated: int) -> None:
    alone = submit(1, [4, 5, 6], max_tokens=9)
    want = undisturbed([4, 5, 6], alone.sampling)
    run = Run(settings())
    generated = np.array(want[:num_generated], np.int32).tobytes()
    run.planner.submit(Submit(1, alone.prompt_ids, alone.sampling, "", generated, True), 0.0)
    run.finish()
    assert run.said[1] == want[num_generated:]
    assert (run.ended[1].usage.num_prompt_tokens, run.ended[1].usage.num_generated_tokens) == (3, 9)


def test_forgotten_requests_say_nothing_more() -> None:
    run = Run(settings(max_num_seqs=2))
    for number in range(4):
        run.planner.submit(submit(number, [number], max_tokens=9), 0.0)
    for _ in range(3):
        run.plan()
        run.execute()
    run.planner.forget(Forget(10))
    said = {number: list(ids) for number, ids in run.said.items()}
    assert run.planner.submit(submit(9, [1]), 0.0) is None  # it was on its way when its tokenizer died
    run.planner.submit(submit(10, [1], max_tokens=4), 0.0)
    run.finish()
    assert {number: ids for number, ids in run.said.items() if number < 10} == said
    assert list(run.ended) == [10]
