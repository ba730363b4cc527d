"""What Prometheus reads at /metrics: what this door has seen, and the engine's gauges.

What vLLM has too has two names, `tercet:x` and `vllm:x`, so that dashboards made for either work. Pure but for the
clock. Requests that came through other doors count in the engine's gauges only. Those have a series for each replica,
by the label `engine`; what the door counts has that label only where there is one replica.
"""

import contextlib
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from tercet.engine.process_load import ProcessLoad
from tercet.ipc.answers import EngineInfo, Gauges, Usage
from tercet.ipc.client import ClientError, Generation

_PREFIXES = ("tercet:", "vllm:")
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
_LONG = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 480.0, 1920.0)
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)


class Histogram:
    """How often a value was at most so much."""

    def __init__(self, help: str, bounds: Sequence[float]) -> None:
        self.help = help
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def lines(self, name: str, labels: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self._sum!r}"
        yield f"{name}_count{{{labels}}} {total}"


class Metrics:
    """Counts since this process started."""

    def __init__(self, model: str, num_replicas: int = 1) -> None:
        self._model = f'model_name="{_escaped(model)}"'
        self._labels = self._of_replica(0) if num_replicas == 1 else self._model
        """Of what this door counts, whichever replica it was."""
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        """Whatever became of their requests."""
        self.ends: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self.answers: Counter[tuple[str, int]] = Counter()
        """HTTP answers by path and status."""
        self.histograms = {
            "time_to_first_token_seconds": Histogram("From the request to its first token.", _LONG),
            "inter_token_latency_seconds": Histogram("From one token to the next.", _SHORT),
            "e2e_request_latency_seconds": Histogram("From the request to its end.", _LONG),
            "request_queue_time_seconds": Histogram("Waiting for its turn.", _LONG),
            "request_prefill_time_seconds": Histogram("From its turn to the first token.", _LONG),
            "request_decode_time_seconds": Histogram("From the first token to the last.", _LONG),
            "request_prompt_tokens": Histogram("Tokens of a prompt.", _SIZES),
            "request_generation_tokens": Histogram("Tokens of an answer.", _SIZES),
        }

    def render(self, info: EngineInfo | None, loads: Sequence[ProcessLoad] = ()) -> str:
        """Prometheus' text format. `info`: the engine's gauges, if it answers; `loads`: of its processes."""
        lines: list[str] = []
        for name, kind, help, value in self._counts(info):
            for prefix in _PREFIXES:
                lines += _head(prefix + name, kind, help)
                lines.append(f"{prefix}{name}{{{self._labels}}} {value}")
        known = () if info is None else info.replicas or (info,)
        offloads = any(one.num_host_pages for one in known)  # of one that has said nothing yet, nobody knows
        replicas = [_gauges(one, offloads=offloads) for one in known]
        for several in zip(*replicas, strict=True):
            name, kind, help, _ = several[0]
            for prefix in _PREFIXES:
                lines += _head(prefix + name, kind, help)
                for replica, (*_, value) in enumerate(several):
                    lines.append(f"{prefix}{name}{{{self._of_replica(replica)}}} {value}")
        for prefix in _PREFIXES:
            name = f"{prefix}request_success_total"
            lines += _head(name, "counter", "Requests that have ended, by reason.")
            lines += [f'{name}{{{self._labels},finished_reason="{end}"}} {count}' for end, count in self.ends.items()]
            for name, histogram in self.histograms.items():
                lines += _head(prefix + name, "histogram", histogram.help)
                lines += histogram.lines(prefix + name, self._labels)
        lines += _head("tercet:http_responses_total", "counter", "HTTP answers.")
        for (path, status), count in sorted(self.answers.items()):
            lines.append(f'tercet:http_responses_total{{path="{path}",status="{status}"}} {count}')
        lines += _head("tercet:process_cpu_seconds_total", "counter", "Processor time of each process.")
        for load in loads:
            lines.append(f'tercet:process_cpu_seconds_total{{process="{load.name}"}} {load.cpu_seconds}')
        lines += _head("tercet:process_resident_memory_bytes", "gauge", "Memory of each process.")
        for load in loads:
            lines.append(f'tercet:process_resident_memory_bytes{{process="{load.name}"}} {load.resident_bytes}')
        return "\n".join(lines) + "\n"

    def _of_replica(self, replica: int) -> str:
        return f'{self._model},engine="{replica}"'

    def _counts(self, info: EngineInfo | None) -> Iterable[tuple[str, str, str, float]]:
        yield "prompt_tokens_total", "counter", "Tokens of prompts that were answered.", self.num_prompt_tokens
        yield "generation_tokens_total", "counter", "Tokens generated.", self.num_generated_tokens
        yield "engine_up", "gauge", "1 if the engine answers.", int(info is not None)


def _gauges(of: EngineInfo | Gauges, *, offloads: bool) -> Iterable[tuple[str, str, str, float]]:
    usable = max(1, of.num_pages - 1)  # page 0 is nobody's
    used = max(0.0, 1 - of.num_free_pages / usable)
    yield "num_requests_running", "gauge", "Requests being computed.", of.num_running
    yield "num_requests_waiting", "gauge", "Requests waiting for their turn.", of.num_waiting
    yield "kv_cache_usage_perc", "gauge", "Share of the KV cache in use, 0 to 1.", used
    yield "num_preemptions_total", "counter", "Requests interrupted for want of cache.", of.num_preemptions
    yield "prefix_cache_queries_total", "counter", "Prompt tokens looked up in the cache.", of.num_prefix_queries
    in_cache = of.num_prefix_hits - of.num_host_hits
    yield "prefix_cache_hits_total", "counter", "Prompt tokens that were found there.", in_cache
    if offloads:  # else vLLM has none of these either
        asked = of.num_prefix_queries - in_cache
        yield "external_prefix_cache_queries_total", "counter", "Prompt tokens that were not found there.", asked
        came = "Those of them that came from the host's memory."
        yield "external_prefix_cache_hits_total", "counter", came, of.num_host_hits
        yield "kv_offload_store_bytes_total", "counter", "Copied to the host's memory.", of.num_stored_bytes
        yield "kv_offload_load_bytes_total", "counter", "Copied back from there.", of.num_loaded_bytes
    yield "steps_total", "counter", "Steps of the engine.", of.num_steps
    drafts = "Steps of a request in which it had tokens to guess."
    yield "spec_decode_num_drafts_total", "counter", drafts, of.num_trials
    yield "spec_decode_num_draft_tokens_total", "counter", "Tokens guessed.", of.num_guesses
    yield "spec_decode_num_accepted_tokens_total", "counter", "Guesses that were right.", of.num_right_guesses


class RequestTimer:
    """One answer, from the request's beginning to its own one end."""

    def __init__(self, metrics: Metrics, *, tells_prompt: bool) -> None:
        """`tells_prompt`: of several answers to one prompt, one counts its tokens."""
        self._metrics = metrics
        self._tells_prompt = tells_prompt
        self._began = self._last = time.monotonic()
        self._num_tokens = 0

    def add(self, num_tokens: int) -> None:
        """So many tokens have come at once."""
        if not num_tokens:
            return
        now, histograms = time.monotonic(), self._metrics.histograms
        if self._num_tokens == 0:
            histograms["time_to_first_token_seconds"].observe(now - self._began)
            if num_tokens > 1:
                histograms["inter_token_latency_seconds"].observe(0.0, num_tokens - 1)
        else:
            histograms["inter_token_latency_seconds"].observe((now - self._last) / num_tokens, num_tokens)
        self._last = now
        self._num_tokens += num_tokens

    def end_whole(self, generation: Generation) -> None:
        """It was not streamed: the engine knows when its tokens came."""
        usage, histograms = generation.usage, self._metrics.histograms
        histograms["time_to_first_token_seconds"].observe(usage.queued_s + usage.prefill_s)
        if (gaps := usage.num_generated_tokens - 1) > 0:
            histograms["inter_token_latency_seconds"].observe(usage.decode_s / gaps, gaps)
        self.end(generation)

    def end_vector(self, usage: Usage) -> None:
        """It has its answer, which is no text."""
        self._count_prompt(usage)
        self._close("stop")

    def end(self, generation: Generation) -> None:
        """It has its answer."""
        usage, histograms = generation.usage, self._metrics.histograms
        self._count_prompt(usage)
        histograms["request_decode_time_seconds"].observe(usage.decode_s)
        histograms["request_generation_tokens"].observe(usage.num_generated_tokens)
        self._close("length" if generation.reason == "length" else "stop")

    def abort(self) -> None:
        """Its client has left."""
        self._close("abort")

    def fail(self) -> None:
        """It was refused, or failed on the way."""
        self._close("error")

    def _count_prompt(self, usage: Usage) -> None:
        histograms = self._metrics.histograms
        if self._tells_prompt:
            self._metrics.num_prompt_tokens += usage.num_prompt_tokens
        histograms["request_queue_time_seconds"].observe(usage.queued_s)
        histograms["request_prefill_time_seconds"].observe(usage.prefill_s)
        histograms["request_prompt_tokens"].observe(usage.num_prompt_tokens)

    def _close(self, reason: str) -> None:
        self._metrics.ends[reason] += 1
        self._metrics.histograms["e2e_request_latency_seconds"].observe(time.monotonic() - self._began)


@contextlib.contextmanager
def measured(metrics: Metrics, num_answers: int = 1) -> Iterator[dict[int, RequestTimer]]:
    """A timer for each answer to a prompt, by index. Those left end as the request does."""
    timers = {index: RequestTimer(metrics, tells_prompt=not index) for index in range(num_answers)}
    try:
        yield timers
    except ClientError:
        for timer in timers.values():
            timer.fail()
        raise
    except BaseException:  # cancelled or left
        for timer in timers.values():
            timer.abort()
        raise


def _head(name: str, kind: str, help: str) -> list[str]:
    return [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
