"""Any messages at all at the socket, well-formed and not: each request ends once, and nothing is left behind."""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, get_args

import hypothesis.strategies as st
import msgspec
import psutil
import pytest
from hypothesis import HealthCheck, given, settings

from checkpoints import checkpoint
from message_strategy import struct_of
from raw_client import RawClient
from tercet.engine.config import EngineConfig
from tercet.engine.engine_process import EngineProcess
from tercet.ipc import messages
from tercet.ipc.messages import (
    Chat,
    ChatMessage,
    Classify,
    ClassifyIds,
    Embed,
    EmbeddingParams,
    EmbedIds,
    Generate,
    GenerateIds,
    SamplingParams,
)
from whole_engine import wait_until_empty

REQUESTS = (Generate, GenerateIds, Chat, Embed, EmbedIds, Classify, ClassifyIds)
NAMES = ("one of few", "another", "third")
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(-1, 70),
    temperature=st.none() | st.floats(-1, 3),
    stop=st.lists(st.text(max_size=3), max_size=3).map(tuple),
    min_tokens=st.integers(-1, 5),
    logprobs=st.none() | st.integers(-1, 25),
    prompt_logprobs=st.none() | st.integers(-1, 25),
)
LIKELY = st.one_of(
    st.builds(Generate, st.sampled_from(NAMES), st.text(max_size=30), PARAMS),
    st.builds(
        GenerateIds,
        st.sampled_from(NAMES),
        st.lists(st.integers(0, 400), max_size=80).map(lambda ids: b"".join(map(_le, ids))),
    ),
    st.builds(
        Embed,
        st.sampled_from(NAMES),
        st.text(max_size=70),
        st.builds(EmbeddingParams, dimensions=st.none() | st.integers(-1, 2000), normalize=st.none() | st.booleans()),
    ),
    st.builds(
        EmbedIds,
        st.sampled_from(NAMES),
        st.lists(st.integers(0, 400), max_size=80).map(lambda ids: b"".join(map(_le, ids))),
    ),
    st.builds(
        Chat,
        st.sampled_from(NAMES),
        st.lists(st.builds(ChatMessage, st.just("user"), st.text(max_size=9)), max_size=2).map(tuple),
    ),
)
ANY = st.sampled_from(get_args(messages.FromClient)).flatmap(struct_of)


def _le(token_id: int) -> bytes:
    return token_id.to_bytes(4, "little")


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    config = EngineConfig(model=str(checkpoint("llama")), load_format="null", max_model_len=64, max_num_seqs=4)
    with EngineProcess(config) as engine:
        yield engine


def num_files(engine: EngineProcess) -> dict[int, int]:
    return {process.pid: process.num_fds() for process in psutil.Process(engine.process.pid).children()}


@settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(said=st.lists(LIKELY | LIKELY | ANY | st.binary(max_size=40), max_size=20))
def exchange(address: str, said: list[Any]) -> None:
    """Say all that on a new connection: each request that can be told from others ends, and not twice."""
    with RawClient(address) as client:
        for message in said:
            client.socket.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))
        wanted = Counter(one.request_id for one in said if isinstance(one, REQUESTS) and one.request_id in NAMES)
        ends: Counter[str] = Counter()
        for closing in ("all have ended", "none ends again"):
            client.ask("Tokenize", closing, ["Generate", "", "x"])
            answered = False
            for kind, name, *_ in client.items():
                answered = answered or (kind, name) == ("Tokenized", closing)
                ends[name] += name in NAMES and kind in ("Finished", "Embedded", "Classified", "Failed", "Rejected")
                if answered and ends.total() >= wanted.total():
                    break
            assert +ends == wanted


def test_whatever_is_said_nothing_is_left(engine: EngineProcess) -> None:
    with RawClient(engine.address) as client:  # one request makes the connections between the processes, all of them
        client.ask("Generate", "first", "x")
        client.answers(1)
    wait_until_empty(engine.address)
    before = num_files(engine)
    exchange(engine.address)
    wait_until_empty(engine.address)
    deadline = time.monotonic() + 10
    while any(count > before[pid] for pid, count in num_files(engine).items()):
        assert time.monotonic() < deadline, (before, num_files(engine))
        time.sleep(0.1)
    assert num_files(engine).keys() == before.keys(), "a process was replaced"
