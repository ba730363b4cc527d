"""Every message survives its trip, in the shape that is documented, and no other shape passes."""

import random
from typing import Any, get_args

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from message_strategy import struct_of
from tercet.ipc import answers, messages, process_messages, step_messages
from tercet.ipc.answers import Batch
from tercet.ipc.messages import Cancel, Chat, ChatMessage, Generate, Hello, SamplingParams
from tercet.ipc.step_messages import Submit

ALL = (messages, answers, step_messages, process_messages)
UNIONS = {
    name: getattr(module, name)
    for module, names in (
        (messages, ("FromClient",)),
        (answers, ("ToClient",)),
        (step_messages, ("ToTokenizer", "ToScheduler")),
        (process_messages, ("ToChild", "FromChild", "FromSupervisor")),
    )
    for name in names
}


@pytest.mark.parametrize("name", UNIONS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_round_trip(name: str, data: st.DataObject) -> None:
    union = UNIONS[name]
    kinds = get_args(union) or (union,)
    message = data.draw(struct_of(data.draw(st.sampled_from(kinds))))
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
    if name in ("ToChild", "FromChild", "FromSupervisor"):
        encode, decode = msgspec.json.encode, msgspec.json.decode
        assert b"\n" not in encode(message)  # one line each
    again = decode(encode(message), type=union)
    assert type(again) is type(message)
    assert again == message


def test_the_shape_on_the_wire() -> None:
    def plain(message: msgspec.Struct) -> Any:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(message))

    assert plain(Hello()) == ["Hello"]
    assert plain(Cancel("x")) == ["Cancel", "x"]
    assert plain(Chat("x", (ChatMessage("user", "hi"),)))[:3] == ["Chat", "x", [{"role": "user", "content": "hi"}]]
    assert plain(Generate("x", "p", SamplingParams(seed=3, stop="a"), "salt"))[3] == {"seed": 3, "stop": "a"}


def test_fields_with_defaults_may_be_left_out() -> None:
    decoder = msgspec.msgpack.Decoder(messages.FromClient)
    wire = msgspec.msgpack.encode(["Generate", "x", "p", {"temperature": 0, "stop": "a"}])
    assert decoder.decode(wire) == Generate("x", "p", SamplingParams(temperature=0.0, stop="a"))
    assert decoder.decode(msgspec.msgpack.encode(["Generate", "x", "p"])) == Generate("x", "p")


@pytest.mark.parametrize(
    "wire",
    [
        ["Generate", "x"],
        ["Generate", "x", "p", {}, "", "surplus"],
        ["Generate", "x", "p", {"tempurature": 1}],
        ["Generate", "x", "p", {"temperature": "1"}],
        ["Generate", "x", "p", {"max_tokens": 1.5}],
        ["Generate", "x", "p", {"stop": [1]}],
        ["Generate", 7, "p"],
        ["Generate", "x", b"bytes"],
        ["GenerateIds", "x", [1, 2, 3]],
        ["Chat", "x", [["user", "hi"]]],
        ["Chat", "x", [{"role": "user", "content": "hi", "nickname": "bob"}]],
        ["Chat", "x", [{"content": "hi"}]],
        ["Submit", 1, b"", [], ""],
        ["Nonsense", "x"],
        ["generate", "x", "p"],
        [],
        {},
        None,
        7,
        "Hello",
        [["Hello"]],
    ],
)
def test_other_shapes_are_refused(wire: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(wire), type=messages.FromClient)


def test_random_bytes_are_refused_as_such() -> None:
    decoders = [msgspec.msgpack.Decoder(UNIONS[name]) for name in ("FromClient", "ToTokenizer", "ToScheduler")]
    rng = random.Random(0)
    for _ in range(3000):
        raw = rng.randbytes(rng.randrange(40))
        for decoder in decoders:
            with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
                decoder.decode(raw)
    deep = b"\x91" * 100_000 + b"\xc0"
    for decoder in decoders:
        with pytest.raises((msgspec.DecodeError, RecursionError)):
            decoder.decode(deep)


def test_messages_are_frozen_and_closed() -> None:
    for value in (value for module in ALL for value in vars(module).values()):
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and value is not msgspec.Struct:
            assert value.__struct_config__.frozen, value
            assert value.__struct_config__.forbid_unknown_fields, value


def test_one_token_costs_four_bytes() -> None:
    """Number arrays travel packed: 1,000 tokens are 4,000 bytes and a little."""
    sampling = step_messages.Sampling(0.0, 0, 1.0, 0.0, 1, 1, 0, b"")
    wire = msgspec.msgpack.encode(Submit(1, bytes(4000), sampling, ""))
    assert len(wire) < 4100
    assert len(msgspec.msgpack.encode(Batch(()))) < 10
