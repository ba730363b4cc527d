"""What a load test says follows from the times: scripts/serve_report.py."""

import pytest

from serve_report import Timeline, summarize, table


def timeline(sent: float, first: float, gaps: list[float], per_arrival: int = 1) -> Timeline:
    times = [sent + first]
    for gap in gaps:
        times.append(times[-1] + gap)
    return Timeline(sent, 10, times, per_arrival * len(times))


def test_figures_of_known_times() -> None:
    # First tokens after 1 to 100 ms; five tokens each, 2 ms apart, but 7 ms apart in the slowest request.
    ones = [timeline(0.5 * index, 1e-3 * (index + 1), [2e-3] * 4) for index in range(99)]
    ones.append(timeline(49.5, 0.1, [7e-3] * 4))
    report = summarize(ones, slo_ttft_ms=50.5, slo_itl_ms=5)
    assert (report["requests"], report["failed"], report["errors"]) == (100, 0, {})
    assert report["seconds"] == pytest.approx(49.5 + 0.1 + 0.028)
    assert report["requests_per_s"] == pytest.approx(100 / 49.628)
    assert report["output_tokens_per_s"] == pytest.approx(500 / 49.628)
    assert report["prompt_tokens_per_s"] == pytest.approx(1000 / 49.628)
    expected = {"mean": 50.5, "p50": 50.5, "p90": 90.1, "p99": 99.01, "max": 100}
    assert report["ttft_ms"] == pytest.approx(expected)
    assert report["itl_ms"] == pytest.approx({"mean": 2.05, "p50": 2, "p90": 2, "p99": 2.05, "max": 7}, abs=1e-6)
    assert report["tpot_ms"]["max"] == pytest.approx(7)
    assert report["e2e_ms"]["p50"] == pytest.approx(58.5)
    assert report["good_share"] == 0.5
    assert report["good_requests_per_s"] == pytest.approx(50 / 49.628)
    assert summarize(ones, slo_itl_ms=5)["good_share"] == 0.99
    assert summarize(ones)["good_share"] == 1.0


def test_first_tokens_while_warming_up_do_not_count() -> None:
    ones = [timeline(0, 1.0, [0.1]), Timeline(0, 10, error="late"), timeline(0, 0.25, [0.1]), timeline(0, 0.5, [0.1])]
    report = summarize(ones, num_warm_up=2)
    assert report["first_tokens_ms"] == pytest.approx([250, 500])
    assert report["ttft_ms"]["mean"] == pytest.approx(375)
    assert (report["requests"], report["failed"], report["arrivals"]) == (4, 1, 6)
    assert report["e2e_ms"]["max"] == pytest.approx(1100)
    assert summarize(ones)["first_tokens_ms"] == pytest.approx([1000, 250, 500])


def test_several_tokens_at_once_are_one_gap_and_many_tokens() -> None:
    report = summarize([timeline(0, 0.01, [0.04] * 2, per_arrival=4)])
    assert report["itl_ms"]["p50"] == pytest.approx(40)
    assert report["tpot_ms"]["p50"] == pytest.approx(80 / 11)


def test_failures_count_against_the_goal_and_not_in_the_times() -> None:
    ones = [timeline(0, 1, [1]), Timeline(0, 10, [5.0], 1, "overloaded: ask later"), Timeline(0, 10)]
    report = summarize(ones, slo_ttft_ms=2000)
    assert report["errors"] == {"overloaded: ask later": 1, "no token came": 1}
    assert report["failed"] == 2
    assert report["ttft_ms"]["max"] == 1000
    assert report["good_share"] == pytest.approx(1 / 3)
    assert any("1 x overloaded" in line for line in table(report))
    nothing = summarize(ones[1:])
    assert nothing["failed"] == 2
    assert len(table(nothing)) == 3
