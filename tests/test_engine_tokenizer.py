"""The tokenizer process, real: what it makes of requests. Its scheduler is played by the test."""

import asyncio
import threading
from array import array
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import anyio
import msgspec
import zmq

from tercet.engine.aside import Aside
from tercet.engine.config import EngineConfig
from tercet.engine.front_desk import FrontDesk
from tercet.engine.live import Client, Live
from tercet.engine.preparation import Prepared
from tercet.engine.refusal import Refusal
from tercet.engine.tokenizer_loop import Tokenizer
from tercet.ipc.answers import Batch, EngineInfo, Failed, Finished, ToClient
from tercet.ipc.front_door import Delivery
from tercet.ipc.messages import Cancel, Chat, ChatMessage, Generate, GenerateIds, Hello, SamplingParams
from tercet.ipc.process_messages import Limits, NewLimits
from tercet.ipc.step_messages import Abort, Ended, Load, Unservable
from tokenizer_process import (
    EOS,
    USAGE,
    TokenizerProcess,
    byte_checkpoint,
    byte_tokenizer,
    tokenizer_process,
    tokens,
)
from wire_peer import Peer


def test_who_is_there(shared: TokenizerProcess, peer: Peer) -> None:
    peer.ask(Hello())
    assert peer.receive() == EngineInfo(
        "tiny", "0.1.0", 512, 257, 0, 0, 99, 100, 0, 0, 0, 0, eos_ids=(EOS,), weights="tiny"
    )
    shared.send(Load(3, 4, 5, 6, 7, 8, 9, 10))
    info = None
    while info != EngineInfo("tiny", "0.1.0", 512, 257, 3, 4, 5, 6, 7, 8, 9, 10, eos_ids=(EOS,), weights="tiny"):
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


def test_stop_strings_of_a_request_and_of_the_checkpoint(tmp_path: Path, context: zmq.Context[Any]) -> None:
    """What a request says wins; where it says nothing, None included, those of generation_config.json count."""
    folder = byte_checkpoint(tmp_path)
    (folder / "generation_config.json").write_text('{"stop_strings": ["END", "FIN"]}')
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({}, "END"),
        ({"stop": None, "stop_token_ids": None}, "END"),
        ({"stop": ["a."]}, "a."),
        ({"stop": "b."}, "b."),
        ({"stop": []}, None),
        ({"ignore_eos": True}, None),
        ({"detokenize": False}, None),
        ({"include_stop_str_in_output": True}, "END"),
    ]
    with tokenizer_process(folder) as engine:
        peer = Peer(context, engine.address)
        for number, (params, stop) in enumerate(cases):
            name, text = str(number), "a END a. b. FIN"
            peer.ask(Generate(name, "x", msgspec.convert(params, SamplingParams)))
            submit = engine.next_submit()
            engine.sample(submit.number, text, Ended(submit.number, "length", None, USAGE))
            said, _, end = peer.answer(name)
            assert isinstance(end, Finished)
            assert end.stop == stop, params
            whole = text if params.get("detokenize", True) else ""
            begin = whole.partition(stop)[0] if stop else whole
            assert said == begin + (stop or "" if params.get("include_stop_str_in_output") else "")
            if stop:
                assert isinstance(engine.next_message(), Abort)


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
        peer.ask(Generate("again", text, SamplingParams(n=2)))
        peer.ask(Cancel("again"))
        for index in range(2):
            _, _, end = peer.answer("again")
            assert isinstance(end, Finished)
            assert (end.reason, end.index) == ("cancelled", index)
        assert not engine.has_message(1.5)  # never submitted, so nobody is told


class SlowReception:
    """Encoding takes until it is told to go on."""

    def __init__(self, desk: FrontDesk) -> None:
        self._desk = desk
        self.encoded: list[str] = []
        self.may_go_on = threading.Event()
        self.draining = False

    def admit(self, client: Client, request: Generate, asleep: str | None) -> Live | None:
        return self._desk.open(client, request.request_id)

    def is_quick(self, request: Generate) -> bool:
        return False

    def prepare(self, live: Live, request: Generate) -> Prepared:
        self.encoded.append(request.request_id)
        assert self.may_go_on.wait(10)
        raise Refusal("enough", "was encoded")


async def test_what_was_cancelled_is_not_encoded() -> None:
    """While others are: thousands of long prompts whose client has left would hold up everybody else's."""
    desk = FrontDesk(None)
    reception, ends = SlowReception(desk), list[Failed]()
    link, scheduler, door = Mock(), Mock(), Mock()
    door.send = lambda client, message: ends.append(msgspec.msgpack.decode(message, type=ToClient)) or Delivery.SENT
    aside = Aside(EngineConfig(model="tiny"))
    tokenizer = Tokenizer(door, scheduler, desk, reception, aside, link)  # type: ignore[arg-type]
    async with anyio.create_task_group() as tokenizer._tasks:
        for name in ("a", "b", *"cdefg", "h"):
            tokenizer._admit(b"client", Generate(name, "a long text"), 20)
        while len(reception.encoded) < 2:
            await asyncio.sleep(0.001)
        for name in "bcdefg":
            assert desk.cancel(b"client", name, 0.0)[1]
        reception.may_go_on.set()
    # a and b are each in a thread of its own: either may begin first.
    assert (set(reception.encoded[:2]), reception.encoded[2:]) == ({"a", "b"}, ["h"])
    assert sorted(end.request_id for end in ends) == ["a", "h"]


def test_answers_without_max_tokens_fit_the_workers_that_came_back(
    engine: TokenizerProcess, context: zmq.Context[Any]
) -> None:
    """With fewer pages than those before them: the scheduler would refuse each answer that may be longer."""
    peer = Peer(context, engine.address)
    engine.tell(NewLimits(Limits(3, 512, 257, "float32", "cpu", 8)))
    lengths = []
    while lengths[-1:] != [2 * 64 + 1]:
        peer.ask(Generate("a", "hi"))
        submit = engine.next_submit()
        lengths.append(2 + submit.sampling.max_tokens)
        engine.sample(submit.number, "x", Ended(submit.number, "length", None, USAGE))
        peer.answer("a")
    assert set(lengths) <= {512, 129}


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
    shared.send(Unservable(shared.next_submit().number, "too_long_for_cache", "needs 9 pages of 4"))
    assert peer.item() == Failed("a", "too_long_for_cache", "needs 9 pages of 4")
