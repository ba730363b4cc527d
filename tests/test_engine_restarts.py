"""How often a dead process is started again, and how soon."""

from tercet.engine.restarts import Restarts


def test_delays_grow_until_it_is_enough() -> None:
    restarts = Restarts(5, 60.0)
    assert [restarts.died(float(second)) for second in range(5)] == [0.0, 0.25, 0.5, 1.0, 2.0]
    assert restarts.died(5.0) is None
    assert restarts.verdict == "it died 6 times within 60 s (--max-restarts is 5)"


def test_what_is_long_ago_does_not_count() -> None:
    restarts = Restarts(1, 10.0)
    assert [restarts.died(now) for now in (0.0, 11.0, 22.0)] == [0.0, 0.0, 0.0]
    assert restarts.died(31.0) is None


def test_no_restart_at_all() -> None:
    assert Restarts(0, 60.0).died(1.0) is None


def test_the_delay_has_a_bound() -> None:
    restarts = Restarts(1000, 60.0)
    assert [restarts.died(1.0) for _ in range(900)][-1] == 10.0
