"""Bad input at the door of a whole engine: a clear answer, everybody else undisturbed, every page back afterwards."""

import random
import socket
import struct
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import pytest
import zmq

from checkpoints import checkpoint, random_prompts, reference_greedy
from families import VOCAB_SIZE
from raw_client import RawClient
from tercet.engine.llm import LLM
from whole_engine import bytes_of_pages, tiny_engine, wait_until_empty

pytestmark = pytest.mark.usefixtures("nan_memory")

FAMILY = "llama3"
NUM_PAGES = 31
"""Of 16 tokens, one of them padding: 480 tokens, less than the context of 512."""
LONG = 200
(QUIET_PROMPT,) = random_prompts(1, 9, 9, seed=21)


def ids(count: int) -> bytes:
    return array("i", range(3, 3 + count)).tobytes()


@pytest.fixture(scope="module")
def engine(nan_memory: None) -> Iterator[LLM]:
    memory = bytes_of_pages(FAMILY, NUM_PAGES)
    with tiny_engine(FAMILY, kv_cache_memory=memory, max_num_seqs=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def quiet_answer() -> list[int]:
    (answer,) = reference_greedy(checkpoint(FAMILY), [QUIET_PROMPT], LONG)
    return answer


@pytest.fixture
def undisturbed(engine: LLM, quiet_answer: list[int]) -> Iterator[Callable[[], bool]]:
    """A long answer to somebody else, running while this says so; in the end it must be exact, and all at rest."""
    wait_until_empty(engine.address)
    with RawClient(engine.address) as quiet:
        settings = {"temperature": 0, "max_tokens": LONG, "ignore_eos": True}
        quiet.ask("GenerateIds", "quiet", array("i", QUIET_PROMPT).tobytes(), settings)
        answer, end = b"", ""
        rounds = 0

        def running(wait_ms: int = 0) -> bool:
            nonlocal answer, end, rounds
            while not end and quiet.socket.poll(wait_ms):
                for kind, _, *fields in quiet.receive()[1]:
                    answer += fields[1] if kind != "Failed" else b""
                    end = kind if kind != "Delta" else ""
            rounds += not end
            return not end

        yield running
        assert rounds > 1, "it ended before anything happened"
        while running(10_000):
            pass
        assert end == "Finished"
        assert list(memoryview(answer).cast("i")) == quiet_answer
    wait_until_empty(engine.address)


@contextmanager
def rude(engine: LLM) -> Iterator[RawClient]:
    with RawClient(engine.address) as client:
        yield client


NAN, INF = float("nan"), float("inf")
SHORT = {"max_tokens": 2}
MANY = dict.fromkeys(range(1025), 1.0)
REFUSED: list[tuple[tuple[Any, ...], str, str, str]] = [
    (("Generate", "a", ""), "Failed", "invalid_request", "no tokens; want at least 1 token"),
    (("GenerateIds", "a", b""), "Failed", "invalid_request", "no tokens; want at least 1 token"),
    (("GenerateIds", "a", b"\0\0\0"), "Failed", "invalid_request", "prompt_ids is 3 bytes; want 4"),
    (("Chat", "a", []), "Failed", "invalid_request", "messages"),
    (("GenerateIds", "a", struct.pack("<2i", 5, VOCAB_SIZE)), "Failed", "invalid_request", f"0 to {VOCAB_SIZE - 1}"),
    (("GenerateIds", "a", struct.pack("<2i", -1, 5)), "Failed", "invalid_request", "token id -1"),
    (("GenerateIds", "a", ids(400) * 2), "Failed", "prompt_too_long", "800 tokens"),
    (("Generate", "a", "tercet " * 5000), "Failed", "prompt_too_long", "512"),
    (("GenerateIds", "a", ids(10), {"max_tokens": 503}), "Failed", "too_long_for_context", "at most 502"),
    (("GenerateIds", "a", ids(99), {"max_tokens": 400}), "Failed", "too_long_for_cache", "498 tokens of KV cache"),
    *(
        (("GenerateIds", "a", ids(3), {name: value}), "Failed", "invalid_request", name)
        for name, values in {
            "temperature": (-1.0, NAN, INF, -INF, 1e9),
            "top_p": (0.0, -0.5, 1.5, NAN),
            "top_k": (-2,),
            "min_p": (-0.1, 1.1, NAN),
            "max_tokens": (0, -5),
            "min_tokens": (-1,),
            "seed": (-1,),
            "stop": ("", ["a", ""], ["x"] * 17, "x" * 1025),
            "stop_token_ids": ([VOCAB_SIZE], [-1], list(range(9))),
            "repetition_penalty": (0.0, -1.0, NAN, INF),
            "presence_penalty": (2.5, NAN),
            "frequency_penalty": (-2.5, INF),
            "logit_bias": ({VOCAB_SIZE: 1.0}, {-1: 1.0}, {2**40: 1.0}, {5: 101.0}, {5: NAN}, MANY),
            "logprobs": (-1, 21),
            "prompt_logprobs": (-1, 21),
            "n": (-1, 0, 257, 2**40),
        }.items()
        for value in values
    ),
    *(
        (("GenerateIds", "a", ids(3), {name: value}), "Failed", "not_supported", name)
        for name, value in {
            "spaces_between_special_tokens": False,
        }.items()
    ),
    (("Generate", "a", "x", {"temprature": 1}), "Rejected", "bad_message", "temprature"),
    (("Generate", "a", "x", {"seed": 2**63}), "Failed", "invalid_request", "seed"),
    (("Generate", "a", "x", {"max_tokens": "many"}), "Rejected", "bad_message", "max_tokens"),
    (("Generate", "a", "x", {}, "", "surplus"), "Rejected", "bad_message", "object"),
    (("Generate", "a", "x", {}, "", {}, [], "surplus"), "Rejected", "bad_message", "length"),
    (("Generate", "a", "x", {}, "", {}, [b"GIF"]), "Failed", "not_supported", "brings 1 image; want text alone"),
    (("Generate", "a", "x", {}, "", {"received_ids": b"abc"}), "Failed", "invalid_request", "received_ids is 3 bytes"),
    (("GenerateIds", "a", ids(3), SHORT, "", {"received_ids": ids(2)}), "Failed", "invalid_request", "fewer than"),
    (("GenerateIds", "a", ids(3), {}, "", {"received_ids": b"~~~~"}), "Failed", "invalid_request", "received_ids"),
    *(
        (("GenerateIds", "a", ids(3), {"n": 2}, "", {"received_ids": value}), "Failed", "invalid_request", words)
        for value, words in (
            (ids(1), "received_ids is those of 1 answers; want as many as n, 2"),
            ([b"", b"", b""], "those of 3 answers"),
            ([None, None], "nil for every answer"),
            ([ids(1), b"abc"], "received_ids is 3 bytes"),
        )
    ),
    *(
        (("GenerateIds", "a", ids(3), SHORT, "", {name: value}), "Failed", "invalid_request", name)
        for name, values in {"queue_timeout": (0.0, NAN, INF), "timeout": (-1.0, 1e9), "priority": (2**40,)}.items()
        for value in values
    ),
    (("Submit", 1, b"", {}, ""), "Rejected", "bad_message", "Submit"),
    (("Abandon", "all hope"), "Rejected", "bad_message", "Abandon"),
    (("Generate", "", "x"), "Rejected", "bad_request_id", "1 to 256"),
]  # fmt: skip


def test_each_refusal_says_what_came_and_what_is_wanted(engine: LLM, undisturbed: Callable[[], bool]) -> None:
    with rude(engine) as client:
        undisturbed()
        for request, kind, code, words in REFUSED:
            client.ask(*request)
            answer = client.receive()
            if answer[0] == "Batch":
                ((*answer,),) = answer[1]
            assert answer[0] == kind, request
            assert answer[2] == code, answer
            assert words in answer[3], answer
            undisturbed()


def test_bytes_that_are_no_message(engine: LLM, undisturbed: Callable[[], bool]) -> None:
    draw = random.Random(5)
    with rude(engine) as client:
        while undisturbed():
            client.socket.send(draw.randbytes(draw.randint(0, 40)))
            kind, _, code, _ = client.receive()
            assert (kind, code) == ("Rejected", "bad_message")
            client.socket.send_multipart([b"", msgpack.packb(["Hello"])])
            assert client.receive()[3].startswith("a message of 2 frames came; want 1")


def test_two_requests_of_one_name(engine: LLM, undisturbed: Callable[[], bool], quiet_answer: list[int]) -> None:
    settings = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    wanted = quiet_answer[:30]
    with rude(engine) as client:
        while undisturbed():
            client.ask("GenerateIds", "twin", array("i", QUIET_PROMPT).tobytes(), settings)
            client.ask("GenerateIds", "twin", ids(50), settings)
            rejected, got, ended = [], b"", False
            while not (ended and rejected):
                kind, *fields = client.receive()
                if kind == "Rejected":
                    rejected.append(fields)
                    continue
                for name, request_id, *rest in fields[0]:
                    assert request_id == "twin"
                    got += rest[1]
                    ended = name == "Finished"
            ((request_id, code, words),) = rejected
            assert (request_id, code) == ("twin", "duplicate_request_id")
            assert "twin" in words
            assert list(memoryview(got).cast("i")) == wanted


def test_clients_that_vanish(engine: LLM, undisturbed: Callable[[], bool]) -> None:
    """In the queue, at once, and in the middle of their answers; their pages are needed by those who stay."""
    while undisturbed():
        with rude(engine) as client:
            for name in "abc":
                client.ask("GenerateIds", name, ids(90), {"max_tokens": 300, "ignore_eos": True, "seed": 3})
        with rude(engine) as client:
            for i in range(12):
                client.ask("GenerateIds", str(i), ids(20 + i), {"max_tokens": 200, "ignore_eos": True, "seed": i})
            assert next(client.items())[0] == "Delta"


def test_fuzz(engine: LLM, undisturbed: Callable[[], bool]) -> None:
    """Thousands of messages, each a valid one with a few bytes changed, cut or doubled, on changing connections."""
    draw = random.Random(77)
    valid = [
        msgpack.packb(message)
        for message in [
            ("Generate", "a", "once upon a time", SHORT, "salt"),
            ("GenerateIds", "b", ids(20), {**SHORT, "temperature": 0.5, "top_k": 5, "stop": ["xyz"], "seed": 2}),
            ("Chat", "c", [{"role": "user", "content": "hi"}], SHORT),
            ("Cancel", "a"),
            ("Hello",),
        ]
    ]
    for _ in range(40):
        undisturbed()
        with rude(engine) as client:
            for _ in range(100):
                client.socket.send(_mutated(draw, draw.choice(valid)))
            client.ask("Hello")
            while client.receive()[0] != "EngineInfo":  # whatever it says to the rest, it lives
                pass


def _mutated(draw: random.Random, message: bytes) -> bytes:
    changed = bytearray(message)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(changed)) if changed else 0
        match draw.randrange(4):
            case 0:
                changed[at : at + 1] = draw.randbytes(1)
            case 1:
                changed = changed[:at]
            case 2:
                changed[at:at] = changed[: draw.randint(0, 30)]
            case _:
                changed[at : at + draw.randint(1, 4)] = b""
    return bytes(changed)


def test_no_connection_but_bytes(engine: LLM, undisturbed: Callable[[], bool]) -> None:
    """Something that does not even speak ZeroMQ."""
    draw = random.Random(6)
    while undisturbed():
        with socket.socket(socket.AF_UNIX) as plain:
            plain.connect(engine.address.removeprefix("ipc://"))
            try:
                plain.sendall(draw.randbytes(200))
            except BrokenPipeError:
                continue  # it was shown the door already


def test_a_connection_that_asks_for_everything(engine: LLM, undisturbed: Callable[[], bool]) -> None:
    """A message over 64 MiB: that connection is closed, nobody else's."""
    undisturbed()
    with rude(engine) as client:
        monitor = client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        client.ask("Generate", "a", "x" * (65 << 20))
        assert monitor.poll(10_000), "it was not shown the door"
        undisturbed()
        client.socket.disable_monitor()
        monitor.close()
