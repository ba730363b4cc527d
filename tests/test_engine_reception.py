"""What clients may send wrongly, to a real tokenizer process: each gets its answer, and nobody else is disturbed."""

import math
import random
import re
from array import array
from typing import Any

import msgpack
import msgspec
import pytest
import zmq

from tercet.ipc.answers import Failed, Finished, Rejected
from tercet.ipc.messages import (
    Cancel,
    Chat,
    ChatMessage,
    Detokenize,
    Generate,
    GenerateIds,
    Hello,
    SamplingParams,
    Tokenize,
)
from tercet.ipc.step_messages import Abort, Ended
from tokenizer_process import (
    USAGE,
    TokenizerProcess,
    byte_tokenizer,
    rewritten,
)
from wire_peer import Peer, still_serves


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
        (Generate("a", "x" * 512), "prompt_too_long", "512 tokens, and .* context length is 512"),
        (Generate("a", "x" * 10**6), "prompt_too_long", "at least .* context length is 512"),
        (Generate("a", "x", SamplingParams(temperature=-1)), "invalid_request", "temperature is -1.0"),
        (Generate("a", "x", SamplingParams(top_p=float("nan"))), "invalid_request", "top_p is nan"),
        (Generate("a", "x", SamplingParams(max_tokens=512)), "too_long_for_context", "at most 511"),
        (Generate("a", "x", SamplingParams(n=257)), "invalid_request", "n is 257; want 1 to 256"),
        (Generate("a", "x", SamplingParams(spaces_between_special_tokens=False)), "not_supported", "spaces_between"),
        (Generate("a", "x", SamplingParams(logprobs=21)), "invalid_request", "logprobs"),
        (Generate("a", "x", cache_salt="s" * 300), "invalid_request", "cache_salt"),
        (Chat("a", ()), "invalid_request", "messages has 0"),
        (Chat("a", (ChatMessage("user"),)), "invalid_request", "messages has one of user without content; want text"),
        (Chat("a", (ChatMessage("user", "x" * 10**6),)), "prompt_too_long", "512"),
        (Chat("a", (ChatMessage("user", "x" * 20),) * 700), "prompt_too_long", "at least .* context length is 512"),
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
    for message in (Generate(request_id, "x"), Tokenize(request_id, Generate("", "x")), Detokenize(request_id, b"")):
        peer.ask(message)
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
    while rude.socket.poll(200):  # all is answered by now, and may still be on its way
        name = type(rude.receive()).__name__
        answers[name] = answers.get(name, 0) + 1
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
