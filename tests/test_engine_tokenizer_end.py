"""How the tokenizer process starts and ends: drained, abandoned, orphaned, or refusing to start with a reason."""

import resource
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tercet.engine.child import ChildSpec, Paths, remove_sockets
from tercet.engine.config import EngineConfig
from tercet.ipc.addresses import make_addresses
from tercet.ipc.answers import Failed
from tercet.ipc.messages import Cancel, Chat, ChatMessage, Generate, GenerateIds
from tercet.ipc.process_messages import Abandon, Beat, Drain, LastWords
from tercet.ipc.step_messages import Abort, Ended, Submit
from tokenizer_process import (
    USAGE,
    TokenizerProcess,
    byte_checkpoint,
    tokenizer_process,
    tokens,
)
from wire_peer import Peer, still_serves


def test_more_connections_than_files_are_usual(folder: Path, context: zmq.Context[Any]) -> None:
    """A shell lets a program open 1,024 files unless that asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        try:
            engine = stack.enter_context(tokenizer_process(folder))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(300):
            stack.enter_context(closing(connection := socket.socket(socket.AF_UNIX)))
            connection.connect(engine.address.removeprefix("ipc://"))
        still_serves(engine, Peer(context, engine.address))
        assert engine.process.poll() is None


def was_taken(peer: Peer, engine: TokenizerProcess) -> bool:
    """Whether a request that is asked now goes to the scheduler; if not, it is the client who gets an answer."""
    peer.ask(Generate("b", "hi"))
    poller = zmq.Poller()
    for one in (engine._submits._socket, peer.socket):
        poller.register(one, zmq.POLLIN)
    ready = dict(poller.poll(10_000))
    assert len(ready) == 1, ready
    return engine._submits._socket in ready


def test_drain(engine: TokenizerProcess, context: zmq.Context[Any]) -> None:
    peer = Peer(context, engine.address)
    peer.ask(Generate("a", "hi"))
    number = engine.next_submit().number
    engine.tell(Drain())
    deadline = time.monotonic() + 10
    while was_taken(peer, engine):  # the command comes by another way than requests
        peer.ask(Cancel("b"))
        assert isinstance(engine.next_message(), Submit)
        assert isinstance(engine.next_message(), Abort)
        peer.item()
        assert time.monotonic() < deadline
    failed = peer.item()
    assert isinstance(failed, Failed)
    assert (failed.code, failed.retry_after) == ("draining", 1.0)
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
    def num_beats() -> int:
        return sum(isinstance(report, Beat) for report in engine.reports)

    before, deadline = num_beats(), time.monotonic() + 20
    while num_beats() < before + 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def start_and_fail(model_path: Path, listen: tuple[str, ...] = ()) -> str:
    """The last words of a tokenizer that cannot start."""
    addresses = make_addresses(1, listen)
    spec = ChildSpec("tokenizer", 0, EngineConfig(model="tiny"), Paths(str(model_path)), addresses)
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
