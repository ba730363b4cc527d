"""The watch over an engine's processes, called: who is blamed for a death, and what those who come back are told.

Whole engines whose processes die and hang: test_engine_restart.py, test_engine_supervisor.py.
"""

from types import SimpleNamespace

import pytest

from tercet.engine.children import Post
from tercet.engine.config import EngineConfig
from tercet.engine.crew import Crew
from tercet.engine.watch import HTTP, TOKENIZER, ChildDied, Watch
from tercet.ipc.process_messages import (
    Begin,
    Impaired,
    Limits,
    Loaded,
    Mending,
    NewLimits,
    SchedulerRestarted,
    WorkersAway,
    WorkersRestarted,
)

LIMITS = Limits(9, 9, 9, "none", "none", 9)


@pytest.fixture
def crew() -> Crew:
    """Of nobody yet."""
    return Crew(EngineConfig(model="x"), lambda child, message: None)


@pytest.fixture
def watch(crew: Crew) -> Watch:
    return Watch(EngineConfig(model="x"), crew, [LIMITS], lambda post, incarnation: None)


def test_only_those_that_have_served_can_have_died_of_a_request(crew: Crew, watch: Watch) -> None:
    """Memory may still be taken when the next worker loads; or somebody kills that one, too."""

    def dies(*, serving: bool, killed: bool) -> str | None:
        dead = SimpleNamespace(
            post=Post("worker"),
            serving=serving,
            was_killed_from_outside=killed,
            obituary=lambda: "worker 0: OutOfMemoryError" if serving else "worker 0 could not load",
            reap=lambda selector: None,
        )
        crew.dead.append(dead)  # type: ignore[arg-type]
        watch._bury(0.0)
        return watch._blame[0]

    assert dies(serving=True, killed=True) is None
    assert dies(serving=False, killed=False) is None
    assert dies(serving=True, killed=False) == "worker 0: OutOfMemoryError"
    assert dies(serving=False, killed=True) == "worker 0: OutOfMemoryError"


class Two:
    """The watch over two replicas of two ranks each, and what its processes are told."""

    def __init__(self) -> None:
        config = EngineConfig(model="x", data_parallel_size=2, tensor_parallel_size=2)
        self.crew = Crew(config, lambda child, message: None)
        self.spawned: list[Post] = []
        self.watch = Watch(config, self.crew, [LIMITS, LIMITS], self.spawn)
        self.told: dict[Post, list[object]] = {}
        for post in (*both("worker"), *both("scheduler"), TOKENIZER, HTTP):
            self.spawn(post, 0)
            self.serves(post)
        self.spawned.clear()

    def spawn(self, post: Post, incarnation: int) -> None:
        self.spawned.append(post)
        for _ in range(2 if post.role == "worker" else 1):
            self.add(post)

    def add(self, post: Post) -> None:
        told = self.told.setdefault(post, [])
        process = SimpleNamespace(kill=lambda: None, returncode=-9)
        child = SimpleNamespace(
            post=post, name=str(post), loaded=None, begun=False, serving=False, phases={}, tell=told.append,
            process=process, reap=lambda selector: None, obituary=lambda: "it died",
            was_killed_from_outside=True, is_silent=lambda now, timeout: False,
        )  # fmt: skip
        self.crew.children.append(child)  # type: ignore[arg-type]

    def dies(self, post: Post) -> None:
        self.crew.dead.append(self.crew.of(post)[0])
        self.watch.turn(0.0)

    def serves(self, post: Post, limits: Limits = LIMITS) -> None:
        for child in self.crew.of(post):
            child.loaded, child.begun, child.serving = Loaded(limits if post.role == "worker" else None), True, True

    def is_back(self, post: Post, limits: Limits = LIMITS) -> None:
        self.serves(post, limits)
        self.watch.turn(0.0)


def both(role: str) -> list[Post]:
    return [Post(role, replica) for replica in range(2)]


def test_what_dies_is_replaced_in_its_replica() -> None:
    """The HTTP door hears of it when no replica is whole; the tokenizer, which are not."""
    two = Two()
    two.dies(Post("worker", 1))
    assert two.spawned == [Post("worker", 1)]
    assert len(two.crew.of(Post("worker", 0))) == 2
    assert two.told[TOKENIZER] == [Mending((1,))]
    two.told[TOKENIZER].clear()
    two.dies(Post("scheduler", 0))
    assert two.spawned[1:] == [Post("scheduler", 0), Post("worker", 0)], "its ranks may know different plans"
    assert two.told[TOKENIZER] == [Mending((0, 1))]
    names = ("replica 0 scheduler", "replica 0 worker", "replica 1 worker")
    assert two.told[HTTP] == [Impaired(names)]
    fewer = Limits(5, 9, 9, "none", "none", 9)
    two.is_back(Post("worker", 1), fewer)
    assert two.told[TOKENIZER][1:] == [NewLimits(fewer), Mending((0,))]
    assert two.told[HTTP][1:] == [Impaired(())]
    assert [type(told) for told in two.told[Post("scheduler", 1)]] == [WorkersRestarted]
    two.is_back(Post("worker", 0))
    two.is_back(Post("scheduler", 0))
    assert two.told[TOKENIZER][3:] == [NewLimits(fewer), SchedulerRestarted(0), Mending(())]
    two.dies(TOKENIZER)
    assert two.told[HTTP][2:] == [Impaired(("tokenizer",))]


def test_a_new_tokenizer_is_told_who_is_being_mended() -> None:
    two = Two()
    two.dies(Post("worker", 1))
    two.dies(TOKENIZER)
    two.told[TOKENIZER].clear()
    two.is_back(TOKENIZER)
    assert two.told[TOKENIZER][-1:] == [Mending((1,))]


def test_who_is_started_again_has_to_serve_in_time(crew: Crew, watch: Watch) -> None:
    """It has loaded and was told to begin, and then hangs, or waits for an address that another engine has taken."""
    told: list[object] = []
    late = SimpleNamespace(post=Post("tokenizer"), loaded=Loaded(), begun=False, serving=False, tell=told.append)
    crew.children.append(late)  # type: ignore[arg-type]
    watch._arriving[Post("tokenizer")] = 600.0
    watch._help_to_arrive(Post("tokenizer"), 599.0)
    assert told == [Begin(LIMITS)]
    with pytest.raises(ChildDied, match="tokenizer did not come back within --startup-timeout 600 s"):
        watch._help_to_arrive(Post("tokenizer"), 601.0)
    late.serving = True
    watch._help_to_arrive(Post("tokenizer"), 601.0)
    assert not watch._arriving


def test_workers_that_come_back_with_fewer_pages_are_told_of(crew: Crew, watch: Watch) -> None:
    told: dict[str, list[object]] = {"worker": [], "scheduler": [], "tokenizer": []}
    fewer = Limits(5, 9, 9, "none", "none", 9)
    for role, heard in told.items():
        loaded = Loaded(fewer) if role == "worker" else Loaded()
        child = SimpleNamespace(
            post=Post(role), name=role, loaded=loaded, begun=True, serving=True, phases={}, tell=heard.append
        )
        crew.children.append(child)  # type: ignore[arg-type]
    watch._arriving[Post("worker")] = 600.0
    watch._help_to_arrive(Post("worker"), 599.0)
    assert told == {
        "worker": [],
        "scheduler": [WorkersRestarted(1, fewer, None)],
        "tokenizer": [NewLimits(fewer)],
    }


def test_workers_that_read_other_weights_are_on_trial() -> None:
    """Schedulers hear when they have them; if one dies before, those that have them later are others."""
    two = Two()
    two.watch.put_on_trial()
    two.watch.begin_anew()
    for replica in range(2):
        restarted = WorkersRestarted(1 + replica, LIMITS, None, other_weights=True)
        assert two.told[Post("scheduler", replica)] == [restarted]
    two.dies(Post("worker", 0))
    two.is_back(Post("worker", 0))
    assert two.told[Post("scheduler", 0)][1:] == [WorkersRestarted(4, LIMITS, None)]
    two.spawned.clear()
    two.watch.put_on_trial()
    two.dies(Post("worker", 1))
    assert not two.spawned
    assert two.watch.failure == "it died"
    two.watch.send_away()
    two.watch.send_for(on_trial=True, other_weights=True)
    two.watch.turn(0.0)
    assert two.spawned == both("worker")
    for post in both("worker"):
        two.is_back(post)
    assert two.told[Post("scheduler", 1)][1:] == [WorkersAway(), WorkersRestarted(8, LIMITS, None, other_weights=True)]


def test_nobody_misses_workers_that_were_sent_away() -> None:
    two = Two()
    two.watch.send_away()
    assert two.watch.lacks_workers
    assert not two.crew.of(Post("worker", 0)) + two.crew.of(Post("worker", 1))
    two.dies(Post("scheduler", 0))
    assert two.spawned == [Post("scheduler", 0)], "its ranks would know different plans, but there are none"
    two.is_back(Post("scheduler", 0))
    assert two.told[HTTP] == [], "whoever asks is told that it sleeps"
    two.spawned.clear()
    two.watch.send_for(on_trial=True)
    two.watch.turn(0.0)
    assert two.spawned == both("worker")
    assert two.told[TOKENIZER][-1] == Mending((0, 1))
    for post in both("worker"):
        assert two.watch.lacks_workers
        two.is_back(post)
    assert not two.watch.lacks_workers
    assert two.watch.failure is None
    assert two.told[Post("scheduler", 0)] == [WorkersAway(), WorkersAway(), WorkersRestarted(4, LIMITS, None)]
    assert two.told[Post("scheduler", 1)] == [WorkersAway(), WorkersRestarted(5, LIMITS, None)]
    two.dies(Post("worker", 0))
    assert two.spawned[2:] == [Post("worker", 0)], "it has served, and is replaced as ever"


def test_workers_on_trial_are_not_tried_again() -> None:
    two = Two()
    two.watch.send_away()
    two.watch.send_for(on_trial=True)
    two.watch.turn(0.0)
    two.dies(Post("worker", 1))
    assert two.watch.failure == "it died"
    two.watch.turn(0.0)
    assert two.spawned == both("worker")
    two.watch.send_away()
    two.watch.send_for(on_trial=False)
    assert two.watch.failure is None
    two.watch.turn(0.0)
    two.dies(Post("worker", 1))
    two.watch.turn(0.0)
    assert two.spawned[2:] == [*both("worker"), Post("worker", 1)]


def test_workers_on_trial_have_to_serve_in_time(crew: Crew, watch: Watch) -> None:
    watch.send_for(on_trial=True)
    watch._due.clear()
    watch._arriving[Post("worker")] = 600.0
    late = SimpleNamespace(
        post=Post("worker"), loaded=None, begun=False, serving=False,
        process=SimpleNamespace(kill=lambda: None), reap=lambda selector: None,
    )  # fmt: skip
    crew.children.append(late)  # type: ignore[arg-type]
    watch._help_to_arrive(Post("worker"), 601.0)
    assert watch.failure == "worker did not come back within --startup-timeout 600 s"
