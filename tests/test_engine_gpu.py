"""Whole engines on a GPU: the same tokens however they are scheduled; transformers' tokens in fp32; times that fit.

Two tiny random models: one with heads of 128 as real ones have, so that the kernels made for them run, and one with
small heads for the others.
"""

import functools
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from checkpoints import checkpoint, make_checkpoint
from families import VOCAB_SIZE
from tercet.engine.llm import LLM, RequestOutput
from tercet.engine.trace import Record, Span, read_lane
from tercet.ipc.messages import SamplingParams
from whole_engine import GREEDY, generate, greedy_cases, ids_of, wait_until_empty

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
PAGE_SIZE = 64
NUM_TOKENS = 48
SETTINGS = [{"run_ahead": ahead, "max_lease": lease, "max_lease_ms": 1e6} for ahead in (1, 2, 3) for lease in (1, 8)]


REAL_HEADS = {"head_dim": 128, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
"""Four q heads of 128 to a kv head, as in many real models."""


@pytest.fixture(scope="module")
def real_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("real"), **REAL_HEADS, max_position_embeddings=1024)


def engine(model: Path, **options: Any) -> LLM:
    defaults = {
        "page_size": PAGE_SIZE,
        "kv_cache_memory": 256 << 20,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
    }
    return LLM(str(model), device=DEVICE, **{**defaults, **options})


def invariant(model: Path, **options: Any) -> LLM:
    """Batch-invariant, in bf16."""
    return engine(model, dtype="bfloat16", deterministic=True, **options)


@functools.cache
def requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of all lengths; every third greedy, the others seeded."""
    rng = random.Random(11)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 600))] for _ in range(count)]
    params = [
        SamplingParams(
            temperature=(0.0, 1.0, 0.7)[index % 3],
            top_k=(0, 20)[index % 2],
            seed=index,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
        )
        for index in range(count)
    ]
    return prompts, params


def one_by_one(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    return [generate(llm, [prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]


@pytest.fixture(scope="module")
def alone(real_heads: Path) -> list[list[int]]:
    """What each request gets when nothing else runs, in bf16."""
    prompts, params = requests(66)
    with invariant(real_heads, enable_prefix_caching=False) as llm:
        answers = one_by_one(llm, prompts, params)
        wait_until_empty(llm.address)
    assert len(set(map(tuple, answers))) == len(answers)
    assert min(len(set(answer)) for answer in answers) > NUM_TOKENS // 6
    return answers


# ------------------------------------------------------------------------------ fp32 and transformers


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_fp32_greedy_is_transformers(family: str, enforce_eager: bool) -> None:
    prompts, answers = greedy_cases(family)
    with engine(checkpoint(family), dtype="float32", enforce_eager=enforce_eager) as llm:
        assert generate(llm, prompts, GREEDY) == answers
        assert generate(llm, prompts, GREEDY) == answers  # with prefix hits
        wait_until_empty(llm.address)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_fp32_run_ahead_and_leases(settings: dict[str, int]) -> None:
    prompts, answers = greedy_cases("llama")
    with engine(checkpoint("llama"), dtype="float32", max_num_seqs=5, **settings) as llm:
        assert generate(llm, prompts, GREEDY) == answers


# ------------------------------------------------------------------------------------- bf16, as it comes


def test_default_mode_alone_is_the_same_whatever_the_schedule(real_heads: Path) -> None:
    """One request at a time has the same batches everywhere, so that the default mode owes the same tokens too."""
    prompts, params = (values[:8] for values in requests(66))
    with engine(real_heads, dtype="bfloat16", enforce_eager=True, enable_prefix_caching=False) as llm:
        wanted = one_by_one(llm, prompts, params)
    for settings in SETTINGS:
        with engine(real_heads, dtype="bfloat16", enable_prefix_caching=False, **settings) as llm:
            assert one_by_one(llm, prompts, params) == wanted, settings


@pytest.mark.parametrize("page_size", [64, 16], ids=["hopper", "portable"])
def test_turns_of_a_long_chat(tmp_path: Path, page_size: int) -> None:
    """A few tokens behind many that are cached are attended to in parts; whole, they give nearly the same logits."""
    model = make_checkpoint("qwen3", tmp_path, **REAL_HEADS, max_position_embeddings=16_384)
    rng = random.Random(6)
    chats = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (2100, 5000, 13_000)]
    turns = [[*chat, *rng.choices(chat, k=count)] for chat in chats for count in (1, 40, 200)]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    limits = {"dtype": "bfloat16", "max_num_batched_tokens": 16_384, "page_size": page_size}

    def logprobs(llm: LLM, *, cached: bool) -> list[dict[int, float]]:
        said = []
        for turn in turns:  # one by one: beside others a step may have too many tokens for parts
            (output,) = llm.generate([turn], params, use_tqdm=False)
            (row,) = output.outputs[0].logprobs or ()
            said.append({token_id: one.logprob for token_id, one in row.items()})
            assert (output.usage.num_cached_tokens > 2000) == cached
        return said

    with engine(model, enable_prefix_caching=False, **limits) as llm:
        wanted = logprobs(llm, cached=False)
    with engine(model, **limits) as llm:
        generate(llm, chats, [GREEDY] * len(chats))
        got = logprobs(llm, cached=True)
        plain = one_by_one(llm, turns, [structs.replace(params, logprobs=None)] * len(turns))
    for row, exact, (token_id,) in zip(got, wanted, plain, strict=True):
        common = row.keys() & exact.keys()
        assert len(common) > 15
        assert max(abs(row[one] - exact[one]) for one in common) < 0.05
        assert row[token_id] > max(row.values()) - 0.05
        assert max(row.values()) - min(row.values()) > 0.5, "else anything is near"


# --------------------------------------------------------------------------------- bf16, --deterministic


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_in_a_batch_of_all(real_heads: Path, alone: list[list[int]], enforce_eager: bool) -> None:
    prompts, params = requests(66)
    with invariant(real_heads, max_num_seqs=66, enforce_eager=enforce_eager) as llm:
        assert generate(llm, prompts, params) == alone
        wait_until_empty(llm.address)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_run_ahead_and_leases(real_heads: Path, alone: list[list[int]], settings: dict[str, int]) -> None:
    prompts, params = requests(66)
    with invariant(real_heads, max_num_seqs=20, **settings) as llm:
        assert generate(llm, prompts, params) == alone


def test_a_row_alone_in_any_lease(tmp_path: Path) -> None:
    """In default mode, too: where it gets so long that more programs attend to it, in the middle of a lease."""
    model = make_checkpoint("qwen3", tmp_path, **REAL_HEADS, max_position_embeddings=4096)
    rng = random.Random(5)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (501, 740, 1001, 2029)]
    params = [structs.replace(GREEDY, max_tokens=60, ignore_eos=True)] * len(prompts)
    said = []
    for lease in (1, 8):
        limits = {"max_num_batched_tokens": 4096, "max_lease": lease, "max_lease_ms": 1e6}
        with engine(model, dtype="bfloat16", **limits) as llm:
            said.append(one_by_one(llm, prompts, params))
    assert said[0] == said[1]


@pytest.mark.parametrize("budget", [17, 64, 200])
def test_in_chunks(real_heads: Path, alone: list[list[int]], budget: int) -> None:
    prompts, params = requests(66)
    with invariant(real_heads, max_num_batched_tokens=budget, max_num_seqs=min(budget, 40)) as llm:
        assert generate(llm, prompts, params) == alone


@pytest.mark.parametrize("caching", [True, False])
def test_preempted(real_heads: Path, alone: list[list[int]], caching: bool) -> None:
    prompts, params = requests(66)
    per_token = 2 * 2 * 3 * 2 * 128  # k and v, bf16, layers, kv heads, head size
    memory = 40 * PAGE_SIZE * per_token
    with invariant(real_heads, kv_cache_memory=memory, enable_prefix_caching=caching, max_num_seqs=40) as llm:
        outputs: list[RequestOutput] = llm.generate(prompts, params, use_tqdm=False)
        assert sum(output.usage.num_preemptions for output in outputs) > 0
        assert ids_of(outputs) == alone
        wait_until_empty(llm.address)


def test_with_prefix_hits(real_heads: Path, alone: list[list[int]]) -> None:
    prompts, params = requests(66)
    with invariant(real_heads, max_num_seqs=66) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert ids_of(outputs) == alone
        assert all(
            output.usage.num_cached_tokens == (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE
            for output, prompt in zip(outputs, prompts, strict=True)
        )


@pytest.mark.parametrize("caching", [False, True])
def test_several_answers_are_those_of_their_seeds(real_heads: Path, caching: bool) -> None:
    """Batch-invariant, so to the bit: on copied pages, more answers than slots, among others that run ahead."""
    prompts = requests(6)[0]
    params = [SamplingParams(seed=100 * i, n=(1, 7, 20)[i % 3], max_tokens=40, ignore_eos=True) for i in range(6)]
    with invariant(real_heads, enable_prefix_caching=caching) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for prompt, param, output in zip(prompts, params, outputs, strict=True):
            assert param.seed is not None
            each = [structs.replace(param, n=1, seed=param.seed + index) for index in range(param.n)]
            assert [one.token_ids for one in output.outputs] == generate(llm, [prompt] * param.n, each)
        wait_until_empty(llm.address)


# ----------------------------------------------------------------------------------------------- its record


def test_the_record_puts_the_device_on_the_hosts_clock(real_heads: Path, tmp_path: Path) -> None:
    """Every step ran after its launch began and before its tokens were there, one after another."""
    prompts, params = requests(66)
    with engine(real_heads, dtype="bfloat16", trace_dir=str(tmp_path)) as llm:
        generate(llm, prompts[:30], params[:30])
    launch, device, answers = (
        read_lane(next(tmp_path.glob(f"worker-0.{lane}.*"))) for lane in ("launch", "device", "answers")
    )
    launched = [record for record in launch if record.span is Span.LAUNCH]
    assert {record.span for record in device} == {Span.DECODE, Span.PREFILL}
    assert [step.number for step in device] == [one.number for one in launched] == [one.number for one in answers]
    slack_ns = 50_000  # the two clocks are compared once, to some microseconds, and may drift apart

    def in_order(earlier: Sequence[Record], later: Sequence[Record]) -> bool:
        return all(one.begin_ns - slack_ns <= two.begin_ns for one, two in zip(earlier, later, strict=True))

    assert in_order(launched, device)
    assert all(step.end_ns <= one.end_ns + slack_ns for step, one in zip(device, answers, strict=True))
    assert all(first.end_ns <= second.begin_ns for first, second in itertools.pairwise(device))
    assert all(step.end_ns - step.begin_ns > 0 for step in device)
