"""What Prometheus reads and what the log says, of a live engine, after requests whose numbers are known."""

import asyncio
import json
import time
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from checkpoints import checkpoint, tokenizer
from daemon import Daemon, free_port
from http_process import http_process
from tercet.engine.metrics import Metrics
from tercet.ipc.answers import EngineInfo, Gauges
from tokenizer_process import byte_checkpoint, tokenizer_process

SECRET = "pomegranate"
MORE = {"ignore_eos": True, "safety_identifier": "s1", "metadata": {"job": "j1"}}
GENERATED, ABORTED = "tercet:generation_tokens_total", "tercet:request_success_totalabort"
EXTERNAL = (
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "kv_offload_store_bytes",
    "kv_offload_load_bytes",
)
Samples = dict[str, list[tuple[dict[str, str], float]]]


def read_metrics(daemon: Daemon) -> Samples:
    """With the reader of Prometheus' own library, which refuses what is malformed."""
    answer = httpx.get(f"{daemon.http}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples: Samples = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    (found,) = [number for have, number in samples[name] if labels.items() <= have.items()]
    return found


def test_numbers_and_log(capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--device", "cpu", "--kv-cache-memory", "8MiB", "--served-model-name", 'ti"ny', "--page-size", "16"]
    with Daemon(str(checkpoint("llama")), *flags, "--http", f"127.0.0.1:{free_port()}") as daemon:
        num_prompt = ask(daemon)
        check_numbers(daemon, num_prompt)
    check_log(capfd.readouterr().err, num_prompt)


def ask(daemon: Daemon) -> int:
    """Two whole answers, two streamed ones, one left early, one refused, one lost; the length of a prompt."""
    at_start = read_metrics(daemon)
    assert value(at_start, "vllm:kv_cache_usage_perc") == 0
    num_prompt = len(tokenizer().encode(SECRET * 5))
    with OpenAI(base_url=f"{daemon.http}/v1", api_key="none", max_retries=0) as client:
        for stream in (False, True):
            for _ in range(2):
                answer = client.completions.create(
                    model='ti"ny', prompt=SECRET * 5, max_tokens=9, user="u1", stream=stream, extra_body=MORE
                )
                if stream:
                    assert list(answer)
        with client.completions.create(
            model='ti"ny', prompt=SECRET, max_tokens=400, stream=True, extra_body=MORE
        ) as left:
            next(iter(left))
    httpx.post(f"{daemon.http}/v1/completions", json={"prompt": SECRET, "top_p": 9}, headers={"x-request-id": "bad"})
    httpx.get(f"{daemon.http}/{SECRET}/{SECRET}")
    return num_prompt


def check_numbers(daemon: Daemon, num_prompt: int) -> None:
    time.sleep(0.6)  # gauges are refreshed some times a second
    samples = read_metrics(daemon)
    for prefix in ("tercet:", "vllm:"):
        assert value(samples, f"{prefix}prompt_tokens_total", model_name='ti"ny', engine="0") == 4 * num_prompt
        assert 36 < value(samples, f"{prefix}generation_tokens_total") < 36 + 400
        ends = {"stop": 0, "length": 4, "abort": 1, "error": 1}
        for reason, count in ends.items():
            assert value(samples, f"{prefix}request_success_total", finished_reason=reason) == count
        for name in ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"):
            assert value(samples, f"{prefix}{name}_count") == 4
            assert 0 <= value(samples, f"{prefix}{name}_sum") < 30
        assert value(samples, f"{prefix}time_to_first_token_seconds_count") == 5
        assert value(samples, f"{prefix}e2e_request_latency_seconds_count") == 6
        assert value(samples, f"{prefix}inter_token_latency_seconds_count") >= 4 * 8
        assert value(samples, f"{prefix}request_generation_tokens_bucket", le="10") == 4
        assert value(samples, f"{prefix}request_generation_tokens_bucket", le="5") == 0
        assert value(samples, f"{prefix}num_requests_running") == 0
        assert value(samples, f"{prefix}num_requests_waiting") == 0
        assert 0 <= value(samples, f"{prefix}kv_cache_usage_perc") <= 1
        assert value(samples, f"{prefix}prefix_cache_queries_total") >= 4 * num_prompt
        assert value(samples, f"{prefix}prefix_cache_hits_total") >= 3 * (num_prompt // 16 * 16 - 16)
        assert value(samples, f"{prefix}num_preemptions_total") == 0
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            assert value(samples, f"{prefix}spec_decode_num_{name}_total") == 0
        assert value(samples, f"{prefix}engine_up") == 1
    for status, count in (("200", 4), ("400", 1), ("499", 1)):
        assert value(samples, "tercet:http_responses_total", path="/v1/completions", status=status) == count
    assert value(samples, "tercet:http_responses_total", path="other", status="404") == 1


def check_log(said: str, num_prompt: int) -> None:
    assert SECRET not in said.replace(f"/{SECRET}/{SECRET}", "")  # a path is not a prompt
    records = [json.loads(line.removeprefix("[http] ")) for line in said.splitlines() if line.startswith("[http] {")]
    whole, _, streamed, _, left_early, bad, lost = records
    for record in (whole, streamed):
        assert (record["method"], record["path"], record["status"]) == ("POST", "/v1/completions", 200)
        assert (record["user"], record["finish_reasons"]) == ("u1", ["length"])
        assert (record["safety_identifier"], record["metadata"]) == ("s1", {"job": "j1"})
        assert (record["prompt_tokens"], record["completion_tokens"]) == (num_prompt, 9)
        assert 0 < record["seconds"] < 30
        assert record["answer_id"].startswith("cmpl-")
        assert record["time"].startswith("20")
    assert streamed["stream"] is True
    assert left_early["status"] == 499
    assert (bad["request_id"], bad["status"], bad["error"]) == ("bad", 400, "invalid_request")
    assert lost["status"] == 404
    assert "/metrics" not in {record["path"] for record in records}


@pytest.mark.parametrize("offloads", [False, True])
def test_the_host_s_memory_has_series_where_there_is_any(offloads: bool) -> None:
    """Also of a replica that has said nothing yet."""
    told = Gauges(0, 0, 5, 6, 0, 0, 100, 60, num_host_pages=9, num_host_hits=20, num_stored_bytes=7, num_loaded_bytes=3)
    silent = Gauges(0, 0, 5, 6, 0, 0, 0, 0)
    replicas = (told if offloads else silent, silent)
    text = Metrics("m", 2).render(EngineInfo("m", "1", 9, 9, 0, 0, 5, 6, 0, 0, 100, 60, replicas=replicas))
    samples = {
        (sample.name, sample.labels.get("engine")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["vllm:prefix_cache_hits_total", "0"] == (40 if offloads else 0)
    found = [samples[f"vllm:{name}_total", "0"] for name in EXTERNAL if offloads]
    assert found == ([60, 20, 7, 3] if offloads else [])
    assert [(f"tercet:{name}_total", "1") in samples for name in EXTERNAL] == [offloads] * 4


async def test_tokens_of_a_whole_answer_that_nobody_waits_for(tmp_path: Path) -> None:
    """The test plays the model."""
    with tokenizer_process(byte_checkpoint(tmp_path)) as engine, http_process(engine) as url:
        async with httpx.AsyncClient(base_url=url) as client, asyncio.timeout(30):
            asked = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 50}))
            engine.sample((await asyncio.to_thread(engine.next_submit)).number, "12345")
            while (await said_of(client))[GENERATED] < 5:
                await asyncio.sleep(0.05)
            asked.cancel()
            while not (said := await said_of(client))[ABORTED]:
                await asyncio.sleep(0.05)
            assert said[GENERATED] == 5


async def said_of(client: httpx.AsyncClient) -> dict[str, float]:
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    return {
        sample.name + sample.labels.get("finished_reason", ""): sample.value
        for family in families
        for sample in family.samples
    }
