"""Answers that match a grammar say the same alone and in company, and whichever process dies meanwhile."""

import signal
from collections.abc import Iterator

import anyio
import pytest

from checkpoints import random_prompts
from engine_children import children, is_alive
from tercet.engine.llm import LLM
from tercet.ipc.client import Client, RequestRefused
from tercet.ipc.messages import SamplingParams, Structured
from whole_engine import generate, tiny_engine, wait_until_empty

PROMPTS = random_prompts(8, 3, 60, seed=17)
_FORMS = (
    Structured(regex="[a-z ]{200}"),
    Structured(json_schema={"type": "array", "items": {"enum": [1, 22, "x"]}, "minItems": 45, "maxItems": 50}),
)
PARAMS = [
    SamplingParams(
        temperature=(0.0, 1.2)[i % 2],
        seed=i,
        max_tokens=80,
        structured=_FORMS[i // 2] if i < 4 else None,
        ignore_eos=i >= 4,
    )
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny_engine("qwen3", heartbeat_timeout=3, max_num_seqs=6, max_restarts=100, restart_window=0.1) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    answers = [generate(llm, [prompt], [params])[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    assert min(map(len, answers)) > 60
    return answers


def test_in_company(llm: LLM, alone: list[list[int]]) -> None:
    assert generate(llm, PROMPTS, PARAMS) == alone


@pytest.mark.long
def test_without_leases_and_in_chunks(alone: list[list[int]]) -> None:
    with tiny_engine("qwen3", max_num_seqs=6, run_ahead=1, max_lease=1, max_num_batched_tokens=11) as llm:
        assert generate(llm, PROMPTS, PARAMS) == alone


@pytest.mark.parametrize("name", ["worker", "scheduler", "grammar_process"])
async def test_whoever_dies(llm: LLM, alone: list[list[int]], name: str) -> None:
    got: list[list[int]] = [[] for _ in PROMPTS]

    async def stream(client: Client, index: int) -> None:
        async for piece in client.stream(PROMPTS[index], PARAMS[index]):
            got[index] += piece.token_ids

    with anyio.fail_after(60):
        async with Client(llm.address) as client, anyio.create_task_group() as tasks:
            for index in range(len(PROMPTS)):
                tasks.start_soon(stream, client, index)
            while max(map(len, got[:4])) < 5:
                await anyio.sleep(0.002)
            supervisor = llm._engine.process.pid
            (scheduler,) = children(supervisor, "scheduler")
            (process,) = children(scheduler.pid if name == "grammar_process" else supervisor, name)
            (helper,) = children(scheduler.pid, "grammar_process")
            process.send_signal(signal.SIGKILL)
            assert min(map(len, got)) < 60
    assert got == alone
    if name != "worker":
        assert not is_alive(helper)
    await anyio.to_thread.run_sync(wait_until_empty, llm.address)


async def test_the_others_do_not_wait(llm: LLM, alone: list[list[int]]) -> None:
    """With the process that computes masks stopped: answers without a grammar end, and those with one go on later."""
    got: dict[int, list[int]] = {}

    async def ask(client: Client, index: int) -> None:
        got[index] = list((await client.generate(PROMPTS[index], PARAMS[index])).token_ids)

    with anyio.fail_after(60):
        async with Client(llm.address) as client, anyio.create_task_group() as tasks:
            await ask(client, 0)  # so that there is one
            (scheduler,) = children(llm._engine.process.pid, "scheduler")
            (process,) = children(scheduler.pid, "grammar_process")
            process.send_signal(signal.SIGSTOP)
            for index in range(1, 4):
                tasks.start_soon(ask, client, index)
            async with anyio.create_task_group() as free:
                for index in range(4, 8):
                    free.start_soon(ask, client, index)
            assert set(got) == {0, 4, 5, 6, 7}
            process.send_signal(signal.SIGCONT)
    assert [got[index] for index in range(8)] == alone


@pytest.mark.parametrize(
    "form",
    [
        Structured(json_schema={"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}),
        Structured(grammar="start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(3500)) + 'r3500: "a"\n'),
    ],
    ids=["endless recursion", "deep recursion"],
)
async def test_a_form_that_overflows_the_library_s_stack(llm: LLM, alone: list[list[int]], form: Structured) -> None:
    """Is refused, or held to; whoever else is there goes on."""
    (tokenizer,) = children(llm._engine.process.pid, "tokenizer")
    with anyio.fail_after(60):
        async with Client(llm.address) as client:
            others = client.stream(PROMPTS[0], PARAMS[0])
            first = await anext(others)
            with pytest.raises(RequestRefused, match="does not compile: the process that tries it died"):
                await client.generate(PROMPTS[1], SamplingParams(max_tokens=5, structured=form))
            rest = [token_id async for piece in others for token_id in piece.token_ids]
    assert [*first.token_ids, *rest] == alone[0]
    assert is_alive(tokenizer)
