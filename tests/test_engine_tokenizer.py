"""The tokenizer process, real: bad input, rude clients, drain and death. Its scheduler is played by the test."""

import math
import random
import re
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
import zmq
from tokenizer_process import (
    EOS,
    USAGE,
    TokenizerProcess,
    byte_checkpoint,
    byte_tokenizer,
    rewritten,
    tokenizer_process,
    tokens,
)

from tercet.engine.child import ChildSpec, remove_sockets
from tercet.engine.config import EngineConfig
from tercet.ipc.addresses import make_addresses
from tercet.ipc.messages import (
    Abandon,
    Abort,
    Batch,
    Beat,
    Cancel,
    Chat,
    ChatMessage,
    Delta,
    Drain,
    Ended,
    EngineInfo,
    Failed,
    Finished,
    FromClient,
    Generate,
    GenerateIds,
    Hello,
    LastWords,
    Load,
    Rejected,
    SamplingParams,
    ToClient,
    Unservable,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_checkpoint(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[TokenizerProcess]:
    """For tests that leave it as they found it."""
    with tokenizer_process(folder) as process:
        yield process


@pytest.fixture
def engine(folder: Path) -> Iterator[TokenizerProcess]:
    with tokenizer_process(folder) as process:
        yield process


class Peer:
    """A client as a person would write one: a socket and messages."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(address)
        self.waiting: list[Any] = []

    def ask(self, message: FromClient) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def raw(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive(self) -> ToClient:
        assert self.socket.poll(10_000), "no answer"
        return msgspec.msgpack.decode(self.socket.recv(), type=ToClient)

    def item(self) -> Delta | Finished | Failed:
        """The next item, whether in a batch or by itself."""
        while not self.waiting:
            message = self.receive()
            assert isinstance(message, Batch | Failed), message
            self.waiting += message.items if isinstance(message, Batch) else [message]
        return self.waiting.pop(0)

    def answer(self, request_id: str) -> tuple[str, list[int], Finished | Failed]:
        """Text, ids and end of the only running request."""
        text, ids = "", b""
        while True:
            item = self.item()
            assert item.request_id == request_id
            if not isinstance(item, Failed):
                text, ids = text + item.text, ids + item.token_ids
            if not isinstance(item, Delta):
                return text, list(memoryview(ids).cast("i")), item

    def is_quiet(self, seconds: float = 0.1) -> bool:
        return not self.waiting and not self.socket.poll(seconds * 1000)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def peer(shared: TokenizerProcess, context: zmq.Context[zmq.Socket[bytes]]) -> Peer:
    return Peer(context, shared.address)


def still_serves(engine: TokenizerProcess, peer: Peer) -> None:
    peer.ask(Generate("proof", "hi"))
    submit = engine.next_submit()
    engine.sample(submit.number, "fine", Ended(submit.number, "length", None, USAGE))
    text, ids, end = peer.answer("proof")
    assert (text, len(ids), isinstance(end, Finished)) == ("fine", 4, True)


# ------------------------------------------------------------------------------------------- the good life


def test_who_is_there(shared: TokenizerProcess, peer: Peer) -> None:
    peer.ask(Hello())
    assert peer.receive() == EngineInfo("tiny", "0.1.0", 512, 257, 0, 0)
    shared.send(Load(3, 4, 0, 0, 0, 0, 0, 0))
    info = None
    while info != EngineInfo("tiny", "0.1.0", 512, 257, 3, 4):
        peer.ask(Hello())
        info = peer.receive()


def test_text_ids_and_conversations(shared: TokenizerProcess, peer: Peer) -> None:
    tokenizer = byte_tokenizer()
    requests: list[tuple[Any, list[int]]] = [
        (Generate("a", "Größe"), tokenizer.encode("Größe").ids),
        (GenerateIds("a", array("i", [5, 256, 0]).tobytes()), [5, 256, 0]),
        (Chat("a", (ChatMessage("user", "hé"),)), tokenizer.encode("<|user|>hé<|assistant|>").ids),
    ]
    for request, prompt_ids in requests:
        peer.ask(request)
        submit = shared.next_submit()
        assert list(memoryview(submit.prompt_ids).cast("i")) == prompt_ids
        assert submit.sampling.max_tokens == 512 - len(prompt_ids)
        assert list(memoryview(submit.sampling.stop_ids).cast("i")) == [EOS]
        shared.sample(submit.number, "日本</s>", Ended(submit.number, "stop", EOS, USAGE))
        text, ids, end = peer.answer("a")
        assert text == "日本"
        assert ids == tokenizer.encode("日本</s>").ids
        assert isinstance(end, Finished)
        assert (end.reason, end.stop, end.usage) == ("stop", EOS, USAGE)


def test_long_texts_are_encoded_aside_and_cancelled_there(folder: Path, context: zmq.Context[Any]) -> None:
    with tokenizer_process(folder, max_model_len=5_000_000) as engine:
        peer = Peer(context, engine.address)
        text = "word " * 400_000
        peer.ask(Generate("long", text))
        peer.ask(Generate("short", "hi"))
        assert len(engine.next_submit().prompt_ids) == 8  # it overtakes the long one
        submit = engine.next_submit(60)
        assert bytes(submit.prompt_ids) == array("i", byte_tokenizer().encode(text).ids).tobytes()
        peer.ask(Cancel("long"))
        assert isinstance(engine.next_message(), Abort)
        peer.answer("long")
        peer.ask(Generate("again", text))
        peer.ask(Cancel("again"))
        _, _, end = peer.answer("again")
        assert isinstance(end, Finished)
        assert end.reason == "cancelled"
        aborted = engine.next_message()
        assert isinstance(aborted, Abort)
        assert not engine.has_message(1.5)  # never submitted


def test_one_batch_per_client_per_step(shared: TokenizerProcess, context: zmq.Context[Any]) -> None:
    peers = [Peer(context, shared.address) for _ in range(2)]
    numbers: dict[int, tuple[int, str]] = {}
    for i, one in enumerate(peers):
        for name in "abc":
            one.ask(Generate(name, "hi"))
            numbers[shared.next_submit().number] = (i, name)
    shared.send(tokens(dict.fromkeys(numbers, 66)))
    for one in peers:
        batch = one.receive()
        assert isinstance(batch, Batch)
        assert sorted(item.request_id for item in batch.items) == ["a", "b", "c"]
        assert one.is_quiet()
        one.socket.close(linger=0)
    gone: set[int] = set()
    while len(gone) < 6:
        message = shared.next_message()
        assert isinstance(message, Abort)
        gone |= set(memoryview(message.numbers).cast("q"))
    assert gone == set(numbers)


def test_stop_string(shared: TokenizerProcess, peer: Peer) -> None:
    peer.ask(Generate("a", "hi", SamplingParams(stop=("###", "END"))))
    submit = shared.next_submit()
    shared.sample(submit.number, "well EN, END and more")
    text, _, end = peer.answer("a")
    assert isinstance(end, Finished)
    assert (text, end.reason, end.stop) == ("well EN, ", "stop", "END")
    assert shared.next_message() == Abort(array("q", [submit.number]).tobytes())
    assert peer.is_quiet()


def test_unservable(shared: TokenizerProcess, peer: Peer) -> None:
    peer.ask(Generate("a", "hi"))
    shared.send(Unservable(shared.next_submit().number, "unservable", "needs 9 pages of 4"))
    assert peer.item() == Failed("a", "unservable", "needs 9 pages of 4")


# ----------------------------------------------------------------------------------------------- bad input


def test_two_requests_of_one_name(shared: TokenizerProcess, peer: Peer, context: zmq.Context[Any]) -> None:
    peer.ask(Generate("a", "hi"))
    first = shared.next_submit()
    peer.ask(Generate("a", "other"))
    rejected = peer.receive()
    assert isinstance(rejected, Rejected)
    assert (rejected.request_id, rejected.code) == ("a", "duplicate_request_id")
    other = Peer(context, shared.address)  # another connection, another namespace
    other.ask(Generate("a", "hi"))
    second = shared.next_submit()
    for submit, one in ((first, peer), (second, other)):
        shared.sample(submit.number, "x", Ended(submit.number, "length", None, USAGE))
        assert one.answer("a")[0] == "x"
    peer.ask(Generate("a", "again"))  # free again
    shared.sample(number := shared.next_submit().number, "y", Ended(number, "length", None, USAGE))
    assert peer.answer("a")[0] == "y"


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (Generate("a", ""), "invalid_request", "at least 1 token"),
        (GenerateIds("a", b""), "invalid_request", "at least 1 token"),
        (GenerateIds("a", b"123"), "invalid_request", "3 bytes"),
        (GenerateIds("a", array("i", [5, 257]).tobytes()), "invalid_request", "token id 257; want ids from 0 to 256"),
        (GenerateIds("a", array("i", [5, -1]).tobytes()), "invalid_request", "token id -1"),
        (Generate("a", "x" * 512), "prompt_too_long", "512 tokens and the context holds 512"),
        (Generate("a", "x" * 10**6), "prompt_too_long", "at least .* and the context holds 512"),
        (Generate("a", "x", SamplingParams(temperature=-1)), "invalid_request", "temperature is -1.0"),
        (Generate("a", "x", SamplingParams(top_p=float("nan"))), "invalid_request", "top_p is nan"),
        (Generate("a", "x", SamplingParams(max_tokens=512)), "invalid_request", "at most 511"),
        (Generate("a", "x", SamplingParams(logprobs=3)), "not_supported", "logprobs"),
        (Generate("a", "x", cache_salt="s" * 300), "invalid_request", "cache_salt"),
        (Chat("a", ()), "invalid_request", "messages has 0"),
        (Chat("a", (ChatMessage("user", "x" * 10**6),)), "prompt_too_long", "512"),
    ],
)
def test_refusals(shared: TokenizerProcess, peer: Peer, request_: Any, code: str, words: str) -> None:
    peer.ask(request_)
    failed = peer.receive()
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.code) == ("a", code)
    assert re.search(words, failed.message)
    still_serves(shared, peer)


@pytest.mark.parametrize(
    ("frames", "request_id", "words"),
    [
        ((b"",), None, "cannot be read"),
        ((b"\xc1\xc1",), None, "cannot be read"),
        ((b"\x91" * 50_000 + b"\xc0",), None, "cannot be read"),
        ((msgpack.packb(["Generate", "a"]),), "a", "cannot be read"),
        ((msgpack.packb(["Generate", "a", "x", {"colour": 1}]),), "a", "colour"),
        ((msgpack.packb(["Explode", "a"]),), "a", "Explode"),
        ((msgpack.packb(["Generate", "\N{LATIN SMALL LETTER A}" * 5000, 7]),), "a" * 256, "cannot be read"),
        ((b"\xa1\xff",), None, "cannot be read"),
        ((b"", msgpack.packb(["Hello"])), None, "2 frames"),
    ],
)
def test_what_is_no_message(
    shared: TokenizerProcess, peer: Peer, frames: tuple[bytes, ...], request_id: str | None, words: str
) -> None:
    peer.raw(*frames)
    rejected = peer.receive()
    assert isinstance(rejected, Rejected)
    assert (rejected.request_id, rejected.code) == (request_id, "bad_message")
    assert words in rejected.message
    still_serves(shared, peer)


@pytest.mark.parametrize("request_id", ["", "x" * 257])
def test_names_of_a_wrong_length(peer: Peer, request_id: str) -> None:
    peer.ask(Generate(request_id, "x"))
    rejected = peer.receive()
    assert isinstance(rejected, Rejected)
    assert rejected.code == "bad_request_id"


def test_cancelling_what_is_not_there(shared: TokenizerProcess, peer: Peer) -> None:
    peer.ask(Cancel("never heard of"))
    still_serves(shared, peer)


def test_fuzz(engine: TokenizerProcess, context: zmq.Context[Any]) -> None:
    """Thousands of random and mutated messages: each gets an answer or ends in one, and a neighbour notices nothing."""
    rng = random.Random(2026)
    neighbour, rude = Peer(context, engine.address), Peer(context, engine.address)
    neighbour.ask(Generate("n", "hi"))
    number = engine.next_submit().number
    seeds = [
        Generate("r", "text", SamplingParams(stop="x", seed=4), "salt"),
        GenerateIds("r", array("i", [1, 2, 3]).tobytes()),
        Chat("r", (ChatMessage("user", "x"), ChatMessage("assistant", "y"))),
        Cancel("r"),
        Hello(),
    ]
    encoded = [msgspec.msgpack.encode(seed) for seed in seeds]
    said = ""
    rounds = 4000
    answers: dict[str, int] = {}
    for i in range(rounds):
        match rng.randrange(5):
            case 0:
                rude.raw(rng.randbytes(rng.randrange(64)))
            case 1:
                message = bytearray(rng.choice(encoded))
                for _ in range(rng.randrange(1, 4)):
                    message[rng.randrange(len(message))] = rng.randrange(256)
                rude.raw(bytes(message))
            case 2:
                message = rng.choice(encoded)
                rude.raw(message[: rng.randrange(len(message))] + rng.randbytes(rng.randrange(3)))
            case 3:
                numbers = [-1, 0, 1, 2**31, 2**63 - 1, -1e300, math.inf, math.nan, 0.5]
                names = rng.sample(["temperature", "top_p", "min_p", "presence_penalty"], 2)
                params = {name: rng.choice(numbers) for name in names}
                params |= {rng.choice(["top_k", "seed", "max_tokens", "min_tokens", "n"]): rng.choice(numbers[:5])}
                params |= {"stop_token_ids": [rng.choice(numbers[:5])], "stop": ["x" * rng.choice([0, 1, 2000])]}
                rude.raw(msgpack.packb(["Generate", f"r{i}", "x", params]))
            case _:
                fields = rewritten(rng, msgpack.unpackb(rng.choice(encoded)))
                if isinstance(fields, list) and len(fields) > 1 and rng.random() < 0.7:
                    fields[1] = f"r{i}"
                rude.raw(msgpack.packb(fields))
        if i % 200 == 0:
            engine.sample(number, "ab")
            said += "ab"
        while engine._submits.receive(0) is not None:  # what was not so broken after all
            pass
        while rude.socket.poll(0):
            name = type(rude.receive()).__name__
            answers[name] = answers.get(name, 0) + 1
    rude.ask(Generate("the last", "x"))
    while True:
        message = engine.next_message()
        if not isinstance(message, Abort) and message.prompt_ids == byte_tokenizer_ids("x"):
            break
    engine.sample(number, "c", Ended(number, "length", None, USAGE))
    text, _, end = neighbour.answer("n")
    assert text == said + "c"
    assert isinstance(end, Finished)
    assert engine.process.poll() is None
    assert answers["Rejected"] > rounds // 3
    assert answers["Failed"] > rounds // 10
    assert answers["EngineInfo"] > 20


def byte_tokenizer_ids(text: str) -> bytes:
    return array("i", byte_tokenizer().encode(text).ids).tobytes()


# -------------------------------------------------------------------------------------------- rude clients


def aborted(engine: TokenizerProcess, wanted: set[int]) -> None:
    """These, and only these, are aborted within a few seconds."""
    got: set[int] = set()
    while got != wanted:
        message = engine.next_message()
        assert isinstance(message, Abort)
        got |= set(memoryview(message.numbers).cast("q"))
        assert got <= wanted


@pytest.mark.parametrize("state", ["waiting", "streaming"])
def test_a_client_that_vanishes(engine: TokenizerProcess, context: zmq.Context[Any], state: str) -> None:
    stays, goes = Peer(context, engine.address), Peer(context, engine.address)
    stays.ask(Generate("a", "hi"))
    kept = engine.next_submit().number
    numbers = set()
    for name in "xyz":
        goes.ask(Generate(name, "hi"))
        numbers.add(engine.next_submit().number)
    if state == "streaming":
        engine.send(tokens(dict.fromkeys(numbers, 70)))
        goes.receive()
    goes.socket.close(linger=0)
    aborted(engine, numbers)
    engine.sample(kept, "still here", Ended(kept, "length", None, USAGE))
    assert stays.answer("a")[0] == "still here"


def test_a_client_process_that_is_killed(engine: TokenizerProcess) -> None:
    program = (
        "import sys, time, zmq, msgpack; s = zmq.Context().socket(zmq.DEALER); s.connect(sys.argv[1]); "
        "s.send(msgpack.packb(['Generate', 'a', 'hi'])); time.sleep(60)"
    )
    client = subprocess.Popen([sys.executable, "-c", program, engine.address])
    number = engine.next_submit(20).number
    client.kill()
    client.wait()
    aborted(engine, {number})


def test_a_storm_of_cancels(engine: TokenizerProcess, context: zmq.Context[Any]) -> None:
    peer = Peer(context, engine.address)
    for i in range(500):
        peer.ask(Generate(str(i), "hi"))
        peer.ask(Cancel(str(i)))
    ends = [peer.item() for _ in range(500)]
    assert {end.request_id for end in ends} == {str(i) for i in range(500)}
    assert all(isinstance(end, Finished) and end.reason == "cancelled" for end in ends)
    submitted, ended = set(), set()
    while len(ended) < 500:
        message = engine.next_message()
        if isinstance(message, Abort):
            ended |= set(memoryview(message.numbers).cast("q"))
        else:
            submitted.add(message.number)
    assert submitted == ended
    assert peer.is_quiet()
    still_serves(engine, peer)


def test_a_client_that_does_not_read(engine: TokenizerProcess, context: zmq.Context[Any]) -> None:
    slow, quick = context.socket(zmq.DEALER), Peer(context, engine.address)
    slow.setsockopt(zmq.RCVHWM, 1)
    slow.connect(engine.address)
    slow.send(msgspec.msgpack.encode(Generate("a", "hi")))
    number = engine.next_submit().number
    quick.ask(Generate("q", "hi"))
    kept = engine.next_submit().number
    gone: Abort | None = None
    for _ in range(40_000):
        engine.send(tokens({number: 70}))
        time.sleep(0.0001)  # else several steps make one message
        message = engine._submits.receive(0)
        if message is not None:
            assert isinstance(message, Abort)
            gone = message
            break
    assert gone == Abort(array("q", [number]).tobytes())
    engine.sample(kept, "undisturbed", Ended(kept, "length", None, USAGE))
    assert quick.answer("q")[0] == "undisturbed"
    # Once it reads, it learns its end.
    last: ToClient | None = None
    while slow.poll(5000):
        last = msgspec.msgpack.decode(slow.recv(), type=ToClient)
        if isinstance(last, Batch) and isinstance(last.items[0], Failed):
            break
    assert isinstance(last, Batch)
    (failed,) = last.items
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.code) == ("a", "slow_client")
    slow.close(linger=0)


# ------------------------------------------------------------------------------------------ life and death


def test_drain(engine: TokenizerProcess, context: zmq.Context[Any]) -> None:
    peer = Peer(context, engine.address)
    peer.ask(Generate("a", "hi"))
    number = engine.next_submit().number
    engine.tell(Drain())
    deadline = time.monotonic() + 10
    while True:  # the command comes by another way than requests
        peer.ask(Generate("b", "hi"))
        if not engine._submits._socket.poll(50):
            break
        peer.ask(Cancel("b"))
        engine.next_message()
        engine.next_message()
        peer.item()
        assert time.monotonic() < deadline
    failed = peer.item()
    assert isinstance(failed, Failed)
    assert failed.code == "draining"
    assert engine.process.poll() is None
    engine.sample(number, "to the end", Ended(number, "length", None, USAGE))
    assert peer.answer("a")[0] == "to the end"
    assert engine.process.wait(5) == 0


def test_drain_with_nothing_to_do(engine: TokenizerProcess) -> None:
    engine.tell(Drain())
    assert engine.process.wait(5) == 0


def test_abandon_fails_everything_and_everybody_hears_it(engine: TokenizerProcess, context: zmq.Context[Any]) -> None:
    peers = [Peer(context, engine.address) for _ in range(3)]
    for one in peers:
        for name in ("a", "b"):
            one.ask(Generate(name, "hi"))
            engine.next_submit()
    engine.tell(Abandon("worker 0 was killed by SIGKILL"))
    assert engine.process.wait(5) == 0
    for one in peers:
        ends = [one.item(), one.item()]
        assert sorted(end.request_id for end in ends) == ["a", "b"]
        for end in ends:
            assert isinstance(end, Failed)
            assert (end.code, end.message) == ("engine_died", "worker 0 was killed by SIGKILL")


def test_it_dies_with_its_supervisor(engine: TokenizerProcess) -> None:
    assert engine.process.stdin is not None
    engine.process.stdin.close()
    assert engine.process.wait(5) == 1
    assert not Path(engine.addresses.directory).exists()


def test_it_beats(engine: TokenizerProcess) -> None:
    time.sleep(2.3)
    assert sum(isinstance(report, Beat) for report in engine.reports) >= 2


def start_and_fail(model_path: Path, listen: tuple[str, ...] = ()) -> str:
    """The last words of a tokenizer that cannot start."""
    addresses = make_addresses(1, listen)
    spec = ChildSpec("tokenizer", 0, EngineConfig(model="tiny"), str(model_path), addresses)
    process = subprocess.Popen(
        [sys.executable, "-m", "tercet.engine.tokenizer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        process.stdin.flush()  # and left open: its end would be the supervisor's death
        lines = process.stdout.readlines()
        assert process.wait(20) == 1
    remove_sockets(addresses, front_doors=False)
    return msgspec.json.decode(lines[-1], type=LastWords).message


def test_a_listen_address_in_use(shared: TokenizerProcess, folder: Path) -> None:
    assert "another process" in start_and_fail(folder, listen=shared.addresses.listen)
    assert Path(shared.address.removeprefix("ipc://")).is_socket()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json cannot be read"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda folder: (folder / "config.json").write_text("[1"), "config.json cannot be read"),
    ],
)
def test_a_broken_folder_ends_it_with_a_reason(tmp_path: Path, damage: Callable[[Path], Any], words: str) -> None:
    folder = byte_checkpoint(tmp_path)
    damage(folder)
    assert words in start_and_fail(folder)


def test_it_imports_nothing_heavy() -> None:
    heavy = "('torch', 'transformers', 'numpy')"
    program = f"import sys, tercet.engine.tokenizer; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout.strip() == b"[]"


def test_ids_only(tmp_path: Path, context: zmq.Context[Any]) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    with tokenizer_process(tmp_path) as engine:
        peer = Peer(context, engine.address)
        for request in (Generate("a", "x"), Chat("a", (ChatMessage("user", "x"),))):
            peer.ask(request)
            failed = peer.item()
            assert isinstance(failed, Failed)
            assert "no tokenizer" in failed.message
        peer.ask(GenerateIds("a", array("i", [3, 4]).tobytes()))
        number = engine.next_submit().number
        engine.send(tokens({number: 9}, Ended(number, "length", None, USAGE)))
        assert peer.answer("a")[:2] == ("", [9])
