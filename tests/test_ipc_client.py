"""The async client against a real tokenizer process, whose scheduler the test plays; and against engines that die."""

import asyncio
import contextlib
import os
import signal
import time
from array import array
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tercet.ipc import client as client_module
from tercet.ipc.client import (
    Client,
    ClientError,
    EngineDied,
    Generation,
    Overloaded,
    Piece,
    RequestRefused,
    RequestTimedOut,
)
from tercet.ipc.messages import ChatMessage, SamplingParams
from tercet.ipc.process_messages import Abandon, Drain
from tercet.ipc.step_messages import Abort, Ended, Submit, Unservable
from tokenizer_process import EOS, USAGE, TokenizerProcess, byte_checkpoint, byte_tokenizer, tokenizer_process, tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_checkpoint(tmp_path_factory.mktemp("client"))


@pytest.fixture
def engine(folder: Path) -> Iterator[TokenizerProcess]:
    with tokenizer_process(folder) as process:
        yield process


@pytest.fixture
async def client(engine: TokenizerProcess) -> AsyncIterator[Client]:
    async with Client(engine.address) as client:
        yield client


async def submitted(engine: TokenizerProcess) -> Submit:
    return await asyncio.to_thread(engine.next_submit)


async def aborted(engine: TokenizerProcess) -> int:
    """The one request that is aborted next."""
    message = await asyncio.to_thread(engine.next_message)
    assert isinstance(message, Abort)
    (number,) = memoryview(message.numbers).cast("q")
    return number


def ended(submit: Submit) -> Ended:
    return Ended(submit.number, "length", None, USAGE)


async def play(engine: TokenizerProcess, text: str) -> None:
    """Answer the next request."""
    submit = await submitted(engine)
    engine.sample(submit.number, text, ended(submit))


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


async def nothing_can_be_asked(client: Client, why: str) -> None:
    for ask in (lambda: client.generate("hi"), lambda: client.tokenize("hi"), lambda: client.info()):
        with pytest.raises(EngineDied, match=why):
            await ask()


# -------------------------------------------------------------------------------------------------- errors


async def test_refusals_are_exceptions_with_reasons(engine: TokenizerProcess, client: Client) -> None:
    with pytest.raises(RequestRefused, match=r"top_p is 2\.0") as refused:
        await client.generate("x", SamplingParams(top_p=2))
    assert refused.value.code == "invalid_request"
    with pytest.raises(RequestRefused, match="at least 1 token"):
        async for _ in client.stream([]):
            pass
    for prompt in (None, b"text", [1.5], [{"role": "user"}]):
        with pytest.raises(ValueError, match="want a str, int32 token ids, or ChatMessages"):
            await client.generate(prompt)  # type: ignore[arg-type]
    for answer in (client.generate, client.tokenize):
        with pytest.raises(RequestRefused, match="got `int`"):
            await asyncio.wait_for(answer([ChatMessage("user", 5)]), 10)  # type: ignore[arg-type]
    running = asyncio.ensure_future(client.generate("beside"))
    beside = await submitted(engine)
    for ask in (client.generate, client.tokenize):
        with pytest.raises(RequestRefused, match="want at most 16777216"):
            await ask("x" * 17_000_000)
    with pytest.raises(RequestRefused, match="want at most 16777216"):
        await client.detokenize(array("i", bytes(17_000_000)))
    engine.sample(beside.number, "on", ended(beside))  # it would not know this number on a new connection
    assert (await running).text == "on"
    task = asyncio.ensure_future(client.generate("x"))
    submit = await submitted(engine)
    engine.send(Unservable(submit.number, "too_long_for_cache", "needs 9 pages of 4"))
    with pytest.raises(RequestRefused, match="9 pages of 4"):
        await task


async def test_a_draining_engine_takes_no_more(engine: TokenizerProcess, client: Client) -> None:
    running = asyncio.ensure_future(client.generate("x"))
    submit = await submitted(engine)
    engine.tell(Drain())
    with pytest.raises(Overloaded, match="shutting down"):
        async with asyncio.timeout(10):
            while True:  # the command comes by another way than requests
                with contextlib.suppress(RequestTimedOut):
                    await client.generate("x", timeout=0.1)
    engine.sample(submit.number, "end", ended(submit))
    assert (await running).text == "end"


async def test_an_engine_that_gives_up_says_why(engine: TokenizerProcess, client: Client) -> None:
    task = asyncio.ensure_future(client.generate("x"))
    await submitted(engine)
    engine.tell(Abandon("worker 0 ran out of memory"))
    with pytest.raises(EngineDied, match="worker 0 ran out of memory"):
        await task


async def test_an_engine_that_is_killed(engine: TokenizerProcess) -> None:
    async with Client(engine.address, connect_timeout=0.5, reconnect_timeout=0) as client:
        tasks = [asyncio.ensure_future(client.generate("x")) for _ in range(3)]
        for _ in tasks:
            await submitted(engine)
        engine.process.kill()
        began = time.monotonic()
        for task in tasks:
            with pytest.raises(EngineDied, match="closed the connection"):
                await task
        with pytest.raises(EngineDied, match="nothing listens"):
            await client.generate("x")
        with pytest.raises(EngineDied, match="nothing answers"):
            await client.info()
        assert time.monotonic() - began < 5


async def test_an_engine_that_hangs(engine: TokenizerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_PING_S", 0.1)
    monkeypatch.setattr(client_module, "_SILENCE_S", 0.5)
    async with Client(engine.address) as client:
        slow = asyncio.ensure_future(client.generate("x"))
        submit = await submitted(engine)
        await asyncio.sleep(1.2)  # pings are answered: slow is not dead
        assert not slow.done()
        os.kill(engine.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(EngineDied, match="said nothing"):
                await asyncio.wait_for(slow, 5)
        finally:
            os.kill(engine.process.pid, signal.SIGCONT)
        # It was only asleep: what it still has to say is for nobody, and it is told so.
        engine.sample(submit.number, "late")
        assert await aborted(engine) == submit.number
        again = asyncio.ensure_future(client.generate("y"))
        await play(engine, "back")
        assert (await again).text == "back"


def test_one_small_tree() -> None:
    for kind in (RequestRefused, Overloaded, EngineDied, RequestTimedOut):
        assert issubclass(kind, ClientError)
    assert issubclass(RequestTimedOut, TimeoutError)
    assert msgspec.json.encode(Generation("x", [1], "length", None, USAGE))
