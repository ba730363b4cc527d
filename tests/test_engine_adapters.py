"""Adapters between a user and the worker: whoever names one is heard, whatever dies meanwhile, and nobody else."""

import asyncio
import signal
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from adapter_folders import make_adapter
from checkpoints import checkpoint
from engine_children import children
from played_scheduler import submitted
from tercet.engine.llm import LLM
from tercet.ipc.beam_search import BeamSearchParams, beam_search
from tercet.ipc.client import Client, RequestRefused
from tercet.ipc.messages import ChatMessage, EmbeddingParams, SamplingParams
from tercet.ipc.step_messages import Submit
from tokenizer_process import TokenizerProcess, byte_tokenizer, tokenizer_process
from whole_engine import generate, info, tiny_engine

ADAPTERS = ("sql=owner/sql", "poems=owner/poems")
POEMS = SamplingParams(adapter="poems", max_tokens=5)


@pytest.fixture
def engine(folder: Path) -> Iterator[TokenizerProcess]:
    with tokenizer_process(folder, adapter=ADAPTERS) as process:
        yield process


async def heard(engine: TokenizerProcess, asking: Any) -> Submit:
    """What the scheduler gets of a question, which is not waited for any longer."""
    task = asyncio.ensure_future(asking)
    submit = await submitted(engine)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.to_thread(engine.next_message)  # to abort it
    return submit


async def test_the_scheduler_hears_its_place(engine: TokenizerProcess, client: Client) -> None:
    assert (await client.info()).adapters == ("sql", "poems")
    sql, search = EmbeddingParams(adapter="sql"), BeamSearchParams(beam_width=2, max_tokens=3, adapter="poems")
    turns = [ChatMessage("user", "hi")]
    for asking, place in (
        (client.generate("hi"), -1),
        (client.generate("hi", SamplingParams(adapter="sql")), 0),
        (client.generate([1, 2], POEMS), 1),
        (client.generate(turns, POEMS), 1),
        (client.embed("hi"), -1),
        (client.embed("hi", sql), 0),
        (client.embed([1, 2], sql), 0),
        (beam_search(client, turns, search), 1),
    ):
        assert (await heard(engine, asking)).sampling.adapter == place
    several = SamplingParams(adapter="poems", n=3, max_tokens=5)
    submit = await heard(engine, client.generate_several("hi", several))
    assert (submit.sampling.adapter, len(submit.siblings)) == (1, 2)


async def test_a_name_that_no_adapter_has(engine: TokenizerProcess, client: Client, shared: TokenizerProcess) -> None:
    async with Client(shared.address) as without:
        for asked, wanted in ((client, "one of 'sql', 'poems', or nothing"), (without, "nothing: the engine has no")):
            for asking in (
                asked.generate("hi", SamplingParams(adapter="prose")),
                asked.embed("hi", EmbeddingParams(adapter="prose")),
            ):
                with pytest.raises(RequestRefused, match=f"adapter is 'prose'; want {wanted}") as refused:
                    await asking
                assert refused.value.code == "invalid_request"
    assert not engine.has_message()


async def test_a_client_names_it_again_when_the_tokenizer_has_died(folder: Path, tmp_path: Path) -> None:
    listen = (f"ipc://{tmp_path}/front",)
    with tokenizer_process(folder, listen=listen, adapter=ADAPTERS) as first:
        async with Client(listen[0]) as client:
            asking = asyncio.ensure_future(client.generate("hi", POEMS))
            submit = await submitted(first)
            first.sample(submit.number, "ab")
            while client.num_tokens != 2:
                await anyio.sleep(0.01)
            first.process.kill()
            with tokenizer_process(folder, listen=listen, adapter=ADAPTERS[::-1]) as second:
                submit = await submitted(second)
                assert submit.sampling.adapter == 0
                assert list(array("i", submit.generated_ids)) == byte_tokenizer().encode("ab").ids
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """As flags."""
    folder, base = tmp_path_factory.mktemp("adapters"), checkpoint("llama")
    sql, poems = (make_adapter(folder / name, base, seed) for seed, name in enumerate(("sql", "poems")))
    return f"sql={sql}", f"poems={poems}"


@pytest.fixture(scope="module")
def llm(adapters: tuple[str, str]) -> Iterator[LLM]:
    """An engine without a model, which says other ids for each adapter."""
    with tiny_engine(
        "llama", adapter=adapters, load_format="null", null_step_ms=5.0, max_restarts=100, restart_window=0.1
    ) as llm:
        yield llm


def test_a_program_has_several_in_one_batch(llm: LLM) -> None:
    assert info(llm.address).adapters == ("sql", "poems")
    params = [SamplingParams(adapter=name, max_tokens=4, ignore_eos=True) for name in (None, "sql", "poems", "sql")]
    ids = generate(llm, [[5, 6, 7]] * 4, params)
    assert ids == [[first + i for i in range(3, 7)] for first in (1000, 1100, 1200, 1100)]
    turn = [{"role": "user", "content": "the cat"}]
    plain, poem = llm.chat([turn, turn], [SamplingParams(max_tokens=5), POEMS], use_tqdm=False)
    assert poem.outputs[0].token_ids[0] == plain.outputs[0].token_ids[0] + 200
    (embedding,) = llm.embed("the cat")
    (poem_s,) = llm.embed("the cat", EmbeddingParams(adapter="poems"))
    assert poem_s.values[0] == embedding.values[0] + 200


@pytest.mark.parametrize("name", ["worker", "scheduler", "tokenizer"])
async def test_whoever_dies_the_same_adapter_goes_on(llm: LLM, name: str) -> None:
    params = SamplingParams(adapter="poems", n=2, max_tokens=80, ignore_eos=True)
    got: list[list[int]] = [[], []]
    (process,) = children(llm._engine.process.pid, name)
    with anyio.fail_after(60):
        async with Client(llm.address) as client:
            async for piece in client.stream([5, 6, 7], params):
                got[piece.index] += piece.token_ids
                if process.is_running() and min(map(len, got)) > 5:
                    process.send_signal(signal.SIGKILL)
    assert got == [[1203 + i for i in range(80)]] * 2
