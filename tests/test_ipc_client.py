"""The async client against a real tokenizer process, whose scheduler the test plays.

Engines that refuse, drain, die or hang: test_ipc_client_errors.py.
"""

import asyncio
import contextlib
import threading
import time
from array import array
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import pytest

from played_scheduler import aborted, ended, play, submitted
from tercet.ipc.client import Client, ClientError, EngineDied, Generation, Piece, RequestTimedOut
from tercet.ipc.messages import ChatMessage, SamplingParams
from tercet.ipc.step_messages import Ended, Submit
from tokenizer_process import EOS, USAGE, TokenizerProcess, byte_tokenizer, tokens


async def test_a_whole_answer(engine: TokenizerProcess, client: Client) -> None:
    task = asyncio.ensure_future(client.generate("hi", SamplingParams(seed=1)))
    await play(engine, "Größe 🦙")
    assert await task == Generation("Größe 🦙", byte_tokenizer().encode("Größe 🦙").ids, "length", None, USAGE)


async def test_a_stream(engine: TokenizerProcess, client: Client) -> None:
    stream = client.stream("hi")
    pieces: list[Piece] = []
    submit: Submit | None = None
    for char in "né\n":
        following = asyncio.ensure_future(anext(stream))
        submit = submit or await submitted(engine)
        engine.send(tokens({submit.number: byte_tokenizer().encode(char).ids[0]}))
        pieces.append(await following)
        if char == "é":  # its second byte
            engine.send(tokens({submit.number: byte_tokenizer().encode(char).ids[1]}))
            pieces.append(await anext(stream))
    assert submit is not None
    engine.send(tokens({submit.number: EOS}, Ended(submit.number, "stop", EOS, USAGE)))
    pieces += [piece async for piece in stream]
    assert [piece.text for piece in pieces] == ["n", "", "é", "\n", ""]
    assert all(piece.generation is None for piece in pieces[:-1])
    ids = [token_id for piece in pieces for token_id in piece.token_ids]
    assert pieces[-1].generation == Generation("né\n", ids, "stop", EOS, USAGE)
    assert ids == [*byte_tokenizer().encode("né\n").ids, EOS]


async def test_news_came_when_it_came_however_busy_its_readers_are(engine: TokenizerProcess, client: Client) -> None:
    heard: list[float] = []

    async def read() -> None:
        async for _ in client.stream("hi"):
            heard.append(client.last_heard)
            busy_until = time.monotonic() + 0.05
            while time.monotonic() < busy_until:
                pass

    readings = [asyncio.ensure_future(read()) for _ in range(2)]
    numbers = [(await submitted(engine)).number for _ in readings]
    for count in (2, 4):
        began = time.monotonic()
        engine.send(tokens(dict.fromkeys(numbers, byte_tokenizer().encode("x").ids[0])))
        while len(heard) < count:
            await asyncio.sleep(0.001)
        assert began <= heard[-2] == heard[-1] <= time.monotonic() - 0.1
    for reading in readings:
        reading.cancel()
    await asyncio.gather(*readings, return_exceptions=True)


async def test_prompts_of_every_kind(engine: TokenizerProcess, client: Client) -> None:
    encode = byte_tokenizer().encode
    for prompt, prompt_ids in (
        ("hé", encode("hé").ids),
        ([5, 6, 256], [5, 6, 256]),
        (array("i", [7]), [7]),
        (np.array([5, 7]), [5, 7]),
        ([ChatMessage("user", "x")], encode("<|user|>x<|assistant|>").ids),
    ):
        task = asyncio.ensure_future(client.generate(prompt, cache_salt="s"))
        submit = await submitted(engine)
        assert list(memoryview(submit.prompt_ids).cast("i")) == prompt_ids
        assert submit.cache_salt == "s"
        engine.sample(submit.number, "x", ended(submit))
        await task
    for bad in ([2**31], [1.5], [None], object()):
        with pytest.raises((ValueError, TypeError)):
            await client.generate(bad)  # type: ignore[arg-type]


async def test_many_at_once_keep_apart(engine: TokenizerProcess, client: Client) -> None:
    count = 200

    async def one(i: int) -> str:
        if i % 2:
            return (await client.generate([i])).text
        return "".join([piece.text async for piece in client.stream([i])])

    tasks = [asyncio.ensure_future(one(i)) for i in range(count)]
    names: dict[int, int] = {}
    for _ in range(count):
        submit = await submitted(engine)
        names[submit.number] = memoryview(submit.prompt_ids).cast("i")[0]
    letters = {number: f"{i:03d}" for number, i in names.items()}
    encode = byte_tokenizer().encode
    for position in range(3):
        engine.send(tokens({number: encode(text[position]).ids[0] for number, text in letters.items()}))
    for number in letters:
        engine.send(tokens({}, Ended(number, "length", None, USAGE)))
    assert await asyncio.gather(*tasks) == [f"{i:03d}" for i in range(count)]


# --------------------------------------------------------------------------------------------- leaving early


async def test_leaving_the_loop_cancels(engine: TokenizerProcess, client: Client) -> None:
    async def first_piece() -> str:
        async for piece in client.stream("hi"):
            return piece.text
        raise AssertionError

    task = asyncio.ensure_future(first_piece())
    submit = await submitted(engine)
    engine.sample(submit.number, "a")
    assert await task == "a"
    assert await aborted(engine) == submit.number


async def test_closing_the_generator_cancels(engine: TokenizerProcess, client: Client) -> None:
    stream = client.stream("hi")
    first = asyncio.ensure_future(anext(stream))
    submit = await submitted(engine)
    engine.sample(submit.number, "a")
    await first
    await stream.aclose()  # type: ignore[attr-defined]
    assert await aborted(engine) == submit.number


@pytest.mark.parametrize("streamed", [True, False])
async def test_cancelling_the_task_cancels(engine: TokenizerProcess, client: Client, streamed: bool) -> None:
    async def ask() -> None:
        if streamed:
            async for _ in client.stream("hi"):
                pass
        else:
            await client.generate("hi")

    task = asyncio.ensure_future(ask())
    submit = await submitted(engine)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await aborted(engine) == submit.number


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_timeout_cancels(engine: TokenizerProcess, client: Client, streamed: bool) -> None:
    async def ask() -> None:
        if streamed:
            async for _ in client.stream("hi", timeout=0.2):
                pass
        else:
            await client.generate("hi", timeout=0.2)

    task = asyncio.ensure_future(ask())
    submit = await submitted(engine)
    engine.sample(submit.number, "some text")  # progress is no excuse
    with pytest.raises(RequestTimedOut, match=r"0\.2 s"):
        await task
    assert await aborted(engine) == submit.number


async def test_leaving_the_client_cancels_and_fails_what_runs(engine: TokenizerProcess) -> None:
    async with Client(engine.address) as client:
        task = asyncio.ensure_future(client.generate("hi"))
        submit = await submitted(engine)
    with pytest.raises(ClientError, match="closed"):
        await task
    assert await aborted(engine) == submit.number
    await nothing_can_be_asked(client, "closed")
    await nothing_can_be_asked(Client(engine.address), "want `async with Client")


def held() -> tuple[int, int]:
    """ZeroMQ's threads, which stay while a socket does, and tasks."""
    names = []
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            names.append((path / "comm").read_text())
    return sum("ZMQ" in name for name in names), len(asyncio.all_tasks())


async def nothing_is_held_but(before: tuple[int, int]) -> None:
    async with asyncio.timeout(10):
        while held() != before:  # a thread that has ended is listed for a moment yet
            await asyncio.sleep(0.01)


async def test_a_client_closes_in_a_scope_that_is_cancelled(engine: TokenizerProcess) -> None:
    async with Client(engine.address):
        pass
    before = held()
    for _ in range(3):
        with anyio.CancelScope() as scope:
            async with Client(engine.address):
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        await nothing_is_held_but(before)
        with anyio.CancelScope() as scope:  # already while it opens
            scope.cancel()
            async with Client(engine.address):
                raise AssertionError
        await nothing_is_held_but(before)


async def test_a_client_closes_in_a_task_that_is_cancelled_again_and_again(engine: TokenizerProcess) -> None:
    async def stay() -> None:
        async with Client(engine.address):
            opened.set()
            await asyncio.sleep(60)

    async with Client(engine.address):
        pass
    before = held()
    opened = asyncio.Event()
    staying = asyncio.ensure_future(stay())
    await opened.wait()
    while not staying.done():
        staying.cancel()
        await asyncio.sleep(0)
    assert staying.cancelled()
    await nothing_is_held_but(before)


async def test_a_client_closes_while_all_threads_are_taken(engine: TokenizerProcess) -> None:
    may_end = threading.Event()
    async with anyio.create_task_group() as tasks:
        async with Client(engine.address):
            for _ in range(int(anyio.to_thread.current_default_thread_limiter().total_tokens)):
                tasks.start_soon(anyio.to_thread.run_sync, may_end.wait, 30)
            await anyio.sleep(0)  # they have their threads
        assert not may_end.is_set()
        assert anyio.to_thread.current_default_thread_limiter().available_tokens == 0
        may_end.set()


async def nothing_can_be_asked(client: Client, why: str) -> None:
    for ask in (lambda: client.generate("hi"), lambda: client.tokenize("hi"), lambda: client.info()):
        with pytest.raises(EngineDied, match=why):
            await ask()
