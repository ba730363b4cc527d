"""Greedy token ids equal to transformers' own, whatever the engine does meanwhile. fp32 on the CPU, real processes.

Families once, alone or with ranks; what may disturb a request (chunks, prefix hits, preemption, run-ahead) on a few of
them.
"""

import subprocess
import sys
from array import array
from collections.abc import Iterator

import anyio
import pytest

from checkpoints import checkpoint, random_prompts, reference_greedy, tokenizer
from covering import long
from families import FAMILIES
from raw_client import RawClient
from tercet.engine.llm import LLM
from tercet.ipc.client import Client
from tercet.ipc.messages import SamplingParams
from whole_engine import (
    GREEDY,
    NUM_TOKENS,
    PAGE_SIZE,
    bytes_of_pages,
    generate,
    greedy_cases,
    ids_of,
    info,
    tiny_engine,
    wait_until_empty,
)

pytestmark = pytest.mark.usefixtures("nan_memory")

FEW = ["qwen3", "mistral", long("llama3"), long("deepseek-v3"), long("gemma4")]
RANKS = {"llama-linear": 2, "llama-bias-tied": 4, "smollm2": 2, "glm4-moe-lite": 2}
# What sets these apart is all in the decoder, which test_model_decoder.py compares.
VARIANTS = ("llama-", "qwen2-window", "glm4-unbiased", "ernie4.5-bias", "exaone4-", "hunyuan-bias", "arcee", "apertus")
IN_THE_DECODER = (*VARIANTS, "phi3", "smollm3", "granite", "gemma3", "olmo2", "olmo3", "seed-oss", "mixtral")
IN_THE_DECODER += ("qwen2-moe", "qwen3-moe", "olmoe", "dots1", "minimax-m2", "deepseek-v2", "youtu", "minicpm3")
IN_THE_DECODER += ("qwen3-next", "qwen3.5", "granite-h", "granite-h-dense", "nemotron-h")  # and test_engine_states.py
ALONE = [
    family if family in ("qwen3", "mistral", "deepseek-v3") else long(family)  # full attention, windows, latents
    for family in FAMILIES
    if family not in RANKS and not family.startswith(IN_THE_DECODER)
]


def some_cases(family: str) -> tuple[list[list[int]], list[list[int]]]:
    """Half of them: enough to fill an engine whose steps or pages are few."""
    prompts, answers = greedy_cases(family)
    return prompts[::2], answers[::2]


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, nan_memory: None) -> Iterator[tuple[str, LLM]]:
    """A family's name and its engine, of one rank and with the usual settings."""
    with tiny_engine(request.param) as llm:
        yield request.param, llm


def shorter(num_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


def test_workers_do_get_nan_memory() -> None:
    code = "import torch; assert torch.empty(1000).isnan().all()"
    subprocess.run([sys.executable, "-c", code, "tercet.engine.worker"], check=True)


@pytest.mark.parametrize(("dtype", "warns"), [("bfloat16", True), long("float32", False)])
def test_16_bits_on_the_cpu_are_said_to_follow_the_batch(
    dtype: str, warns: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with tiny_engine("llama3", dtype=dtype, deterministic=True):
        pass
    assert ("--deterministic has no effect in torch.bfloat16 on the CPU" in capfd.readouterr().err) == warns


@pytest.mark.parametrize("alone", ALONE, indirect=True)
def test_every_family_all_at_once_and_again(alone: tuple[str, LLM]) -> None:
    family, llm = alone
    prompts, answers = greedy_cases(family)
    assert generate(llm, prompts, GREEDY) == answers
    again = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert ids_of(again) == answers
    # All full pages of the prompts are known by now, but a prompt's last token is always computed.
    assert [output.usage.num_cached_tokens for output in again] == [
        (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE for prompt in prompts
    ]


@pytest.mark.parametrize("alone", FEW, indirect=True)
def test_prefix_hits(alone: tuple[str, LLM]) -> None:
    """Alone; whole prompts known (their length a number of pages, and not); conversations that go on; live sharing."""
    family, llm = alone
    sizes = [PAGE_SIZE, 2 * PAGE_SIZE, 5 * PAGE_SIZE, 37]
    first = [prompt[:size] for prompt, size in zip(random_prompts(4, 90, 90, seed=1), sizes, strict=True)]
    answers = reference_greedy(checkpoint(family), first, NUM_TOKENS)
    tails = random_prompts(8, 1, 30, seed=2)
    begun = zip(first, answers, tails[:4], strict=True)
    longer = [prompt + answer[: 20 + 5 * i] + tail for i, (prompt, answer, tail) in enumerate(begun)]
    shared = [first[2][:70] + tail for tail in tails]
    for prompt, answer in zip(first, answers, strict=True):
        for cached in (0, (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE):
            (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
            assert output.outputs[0].token_ids == answer
            assert output.usage.num_cached_tokens == cached
    going_on = llm.generate(longer, GREEDY, use_tqdm=False)
    assert ids_of(going_on) == reference_greedy(checkpoint(family), longer, NUM_TOKENS)
    for output, prompt, before in zip(going_on, longer, first, strict=True):
        assert len(before) // PAGE_SIZE * PAGE_SIZE < output.usage.num_cached_tokens < len(prompt)
    sharing = llm.generate(shared, GREEDY, use_tqdm=False)
    assert ids_of(sharing) == reference_greedy(checkpoint(family), shared, NUM_TOKENS)
    assert {output.usage.num_cached_tokens for output in sharing} == {70 // PAGE_SIZE * PAGE_SIZE}
    wait_until_empty(llm.address)


@pytest.mark.parametrize("family", ["mistral", *map(long, ("qwen3", "deepseek-v3", "gemma4", "gemma4-told"))])
def test_chunks_of_a_tiny_budget(family: str) -> None:
    prompts, answers = some_cases(family)
    with tiny_engine(family, max_num_batched_tokens=7, max_num_seqs=5, enable_prefix_caching=False) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert ids_of(outputs) == answers
    assert not any(output.usage.num_cached_tokens for output in outputs)


@pytest.mark.parametrize(
    ("family", "caching"),
    [
        ("qwen3", False),
        *(long(family, True) for family in ("mistral", "llama3", "deepseek-v3", "gemma4", "gemma4-told")),
    ],
)
def test_preempted(family: str, caching: bool) -> None:
    prompts, answers = some_cases(family)
    memory = bytes_of_pages(family, 24)
    with tiny_engine(family, kv_cache_memory=memory, enable_prefix_caching=caching) as llm:
        assert info(llm.address).num_pages == 24
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert ids_of(outputs) == answers
        assert sum(output.usage.num_preemptions for output in outputs) > 0
        wait_until_empty(llm.address)


# Neither, and both: with drawn tokens, in test_engine_sampling.py.
@pytest.mark.parametrize(("run_ahead", "max_lease"), [(1, 8), long(3, 1), long(1, 1), long(3, 8)])
def test_run_ahead_and_leases(run_ahead: int, max_lease: int) -> None:
    """Requests that end at all lengths, some by a stop token, while others enter."""
    prompts, answers = greedy_cases("llama")
    lengths = [1 + 7 * i % NUM_TOKENS for i in range(len(prompts))]
    params, wanted = [], []
    for i, (answer, length) in enumerate(zip(answers, lengths, strict=True)):
        stop_at = i * 3 % NUM_TOKENS
        stops = i % 3 == 0
        params.append(shorter(length, stop_token_ids=(answer[stop_at],) if stops else ()))
        end = min(length, answer.index(answer[stop_at]) + 1) if stops else length
        wanted.append(answer[:end])
    assert sum(len(ids) < length for ids, length in zip(wanted, lengths, strict=True)) >= 3
    with tiny_engine("llama", run_ahead=run_ahead, max_lease=max_lease, max_lease_ms=1e6, max_num_seqs=5) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert ids_of(outputs) == wanted
        for output, answer, length in zip(outputs, wanted, lengths, strict=True):
            (completion,) = output.outputs
            by_stop = completion.stop_reason is not None
            assert by_stop or len(answer) == length
            assert completion.finish_reason == ("stop" if by_stop else "length")
        assert generate(llm, prompts[:3], GREEDY) == answers[:3]
        wait_until_empty(llm.address)


@pytest.mark.parametrize(
    ("family", "ranks"), [one if one[0].startswith("glm") else long(*one) for one in RANKS.items()]
)
def test_ranks(family: str, ranks: int) -> None:
    """The vocabulary is divisible by neither; four ranks share two KV heads, and all have the same latents."""
    prompts, answers = some_cases(family)
    with tiny_engine(family, tensor_parallel_size=ranks) as llm:
        assert generate(llm, prompts, shorter(18)) == [answer[:18] for answer in answers]


def test_everything_at_once() -> None:
    prompts, answers = (each[::3] for each in greedy_cases("qwen3"))
    options = {
        "tensor_parallel_size": 2,
        "run_ahead": 3,
        "max_lease": 8,
        "max_lease_ms": 1e6,
        "max_num_batched_tokens": 19,
    }
    memory = bytes_of_pages("qwen3", 18) // 2  # each rank has one of the two heads
    with tiny_engine("qwen3", max_num_seqs=9, kv_cache_memory=memory, **options) as llm:
        outputs = [output for _ in range(2) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
        assert ids_of(outputs) == answers * 2
        assert sum(output.usage.num_preemptions for output in outputs) > 0
        wait_until_empty(llm.address)


@pytest.mark.parametrize("alone", ["qwen3"], indirect=True)
def test_every_way_to_ask(alone: tuple[str, LLM]) -> None:
    """`LLM`, `Client` streamed and whole, and a socket with msgpack; ids and text."""
    family, llm = alone
    prompts, answers = greedy_cases(family)
    texts = [tokenizer().decode(answer, skip_special_tokens=True) for answer in answers]

    async def ask_client(address: str) -> None:
        async with Client(address) as client, anyio.create_task_group() as tasks:
            for i, prompt in enumerate(prompts):
                tasks.start_soon((stream_one, whole_one)[i % 2], client, prompt, answers[i], texts[i])

    async def stream_one(client: Client, prompt: list[int], answer: list[int], text: str) -> None:
        pieces = [piece async for piece in client.stream(prompt, GREEDY)]
        assert len(pieces) > 4
        assert [token_id for piece in pieces for token_id in piece.token_ids] == answer
        assert "".join(piece.text for piece in pieces) == text

    async def whole_one(client: Client, prompt: list[int], answer: list[int], text: str) -> None:
        generation = await client.generate(prompt, GREEDY)
        assert (generation.token_ids, generation.text, generation.reason) == (answer, text, "length")

    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert ids_of(outputs) == answers
    assert [output.outputs[0].text for output in outputs] == texts
    anyio.run(ask_client, llm.address)
    with RawClient(llm.address) as raw:
        settings = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        for i, prompt in enumerate(prompts):
            raw.ask("GenerateIds", str(i), array("i", prompt).tobytes(), settings)
        got = raw.answers(len(prompts))
    assert [got[str(i)][:2] for i in range(len(prompts))] == list(zip(texts, answers, strict=True))
    assert all(end[4] == "length" for _, _, end in got.values())
