"""The watch over an engine's processes, called: who is blamed for a death, and what those who come back are told.

Whole engines whose processes die and hang: test_engine_restart.py, test_engine_supervisor.py.
"""

from types import SimpleNamespace

import pytest

from tercet.engine.children import Post
from tercet.engine.config import EngineConfig
from tercet.engine.crew import Crew
from tercet.engine.watch import ChildDied, Watch
from tercet.ipc.process_messages import Begin, Limits, Loaded, NewLimits, WorkersRestarted

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
