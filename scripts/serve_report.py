"""What a load test says: percentiles of waiting, throughput, and how many requests were served well enough. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_PERCENTILES = (50, 90, 99)


@dataclass
class Timeline:
    """One request as its client saw it; times in seconds of one clock."""

    sent: float
    num_prompt: int
    arrivals: list[float] = field(default_factory=list)
    """When something of the answer came."""
    num_tokens: int = 0
    error: str | None = None

    @property
    def fault(self) -> str | None:
        """Why it does not count, if it does not."""
        return self.error if self.error is not None or self.arrivals else "no token came"

    @property
    def first_token_s(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def per_token_s(self) -> float:
        """Mean time of a token after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(self.num_tokens - 1, 1)


def summarize(
    timelines: Sequence[Timeline],
    slo_ttft_ms: float | None = None,
    slo_itl_ms: float | None = None,
    num_warm_up: int = 0,
) -> dict[str, Any]:
    """Figures of all requests. Failed ones count as failed, and nowhere else.

    The first `num_warm_up` find less company than those after them: how long they wait for their first tokens is left
    out. `first_tokens_ms` has everybody else's, as they were sent.

    itl_ms is over every gap between two arrivals of an answer, tpot_ms over each answer's mean time per token. A
    request is good if its first token came within `slo_ttft_ms` and its mean time per token is within `slo_itl_ms`.
    """
    done = [one for one in timelines if one.fault is None]
    errors = dict(Counter(one.fault for one in timelines if one.fault is not None))
    report: dict[str, Any] = {"requests": len(timelines), "failed": len(timelines) - len(done), "errors": errors}
    if not done:
        return report
    seconds = max(one.arrivals[-1] for one in done) - min(one.sent for one in timelines)
    first_tokens = [one.first_token_s for one in timelines[num_warm_up:] if one.fault is None]
    gaps = [gap for one in done for gap in np.diff(one.arrivals).tolist()]
    good = [one for one in done if _is_good(one, slo_ttft_ms, slo_itl_ms)]
    return {
        **report,
        "seconds": seconds,
        "arrivals": sum(len(one.arrivals) for one in done),
        "requests_per_s": len(done) / seconds,
        "output_tokens_per_s": sum(one.num_tokens for one in done) / seconds,
        "prompt_tokens_per_s": sum(one.num_prompt for one in done) / seconds,
        "ttft_ms": _spread(first_tokens),
        "first_tokens_ms": [1e3 * seconds for seconds in first_tokens],
        "itl_ms": _spread(gaps),
        "tpot_ms": _spread([one.per_token_s for one in done if one.num_tokens > 1]),
        "e2e_ms": _spread([one.arrivals[-1] - one.sent for one in done]),
        "slo": {"ttft_ms": slo_ttft_ms, "itl_ms": slo_itl_ms},
        "good_requests_per_s": len(good) / seconds,
        "good_share": len(good) / len(timelines),
    }


def _is_good(one: Timeline, slo_ttft_ms: float | None, slo_itl_ms: float | None) -> bool:
    in_time = slo_ttft_ms is None or 1e3 * one.first_token_s <= slo_ttft_ms
    return in_time and (slo_itl_ms is None or 1e3 * one.per_token_s <= slo_itl_ms)


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    values = 1e3 * np.array(seconds)
    percentiles = {f"p{cut}": float(np.percentile(values, cut)) for cut in _PERCENTILES}
    return {"mean": float(values.mean()), **percentiles, "max": float(values.max())}


def table(report: dict[str, Any]) -> list[str]:
    """Lines to print."""
    lines = [f"requests {report['requests']}, failed {report['failed']}"]
    lines += [f"  {count} x {words}" for words, count in report["errors"].items()]
    if "seconds" not in report:
        return lines
    lines += [
        f"{report['seconds']:.2f} s: {report['requests_per_s']:.2f} requests/s, "
        f"{report['output_tokens_per_s']:.1f} output tokens/s, {report['prompt_tokens_per_s']:.1f} prompt tokens/s",
        f"{'ms':8}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p99", "max")),
    ]
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        if (spread := report[name]) is not None:
            lines.append(f"{name.removesuffix('_ms'):8}" + "".join(f"{value:10.2f}" for value in spread.values()))
    limits = [f"{name} <= {limit:g}" for name, limit in report["slo"].items() if limit is not None]
    if limits:
        share = f"{report['good_requests_per_s']:.2f} requests/s ({report['good_share']:.1%})"
        lines.append(f"goodput  {share} with {' and '.join(limits)}")
    return lines
