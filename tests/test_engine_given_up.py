"""What workers died of twice: who asks for the same is refused for a while, whichever replica's turn it is."""

import msgspec

from tercet.engine.front_desk import FrontDesk
from tercet.ipc.step_messages import Submit, Unservable
from test_engine_front_desk import A, submitted
from test_engine_planner import submit


def test_what_was_given_up_is_not_tried_again_for_a_while() -> None:
    """Whatever its seed is, or how much room there was. Others, and the same later, have their turn."""
    desk = FrontDesk(None, num_replicas=2, restart_window=30.0)
    live = submitted(desk, A, "x")
    live.submit = msgspec.structs.replace(submit(live.number, [1, 9], seed=1), number=live.number)
    assert desk.given_up.refusal(live.submit, 5.0) is None
    desk.outstanding.place(live.asked, 1)
    _, aborts = desk.accept([Unservable(live.number, "kills_workers", "the workers died twice")], 10.0)
    assert not aborts
    assert desk.outstanding.tokens == [0, 0]
    again = submit(2, [1, 9], seed=2, max_tokens=9)
    for now in (10.0, 39.0):
        assert "30 s (--restart-window)" in str(desk.given_up.refusal(again, now))
    others: list[Submit] = [
        submit(3, [1, 9], seed=1, stops=[5]),
        submit(4, [1, 8], seed=1),
        submit(5, [1], seed=1),
    ]
    assert [desk.given_up.refusal(other, 11.0) for other in others] == [None] * 3
    assert desk.given_up.refusal(again, 41.0) is None


def test_who_failed_otherwise_may_ask_again() -> None:
    desk = FrontDesk(None)
    live = submitted(desk, A, "x")
    assert live.submit is not None
    desk.accept([Unservable(live.number, "overloaded", "full", 1.0)], 10.0)
    assert desk.given_up.refusal(live.submit, 10.0) is None
