"""docs/wire.md is enough: its own program, and a client written from its tables, against a real tokenizer process."""

import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from raw_client import RawClient
from tercet.engine import (
    image_sizes,
    images,
    kept_images,
    logits_check,
    outstanding,
    part_count,
    prompt_check,
    request_check,
    structured_check,
)
from tercet.engine.image_settings import ImageLimits
from tercet.ipc import answers, front_door, messages
from tercet.ipc.sockets import MAX_MESSAGE_BYTES, MAX_PLAIN_BYTES
from tercet.ipc.step_messages import Abort, Ended
from tokenizer_process import EOS, USAGE, TokenizerProcess, byte_checkpoint, tokenizer_process

WIRE = (Path(__file__).parent.parent / "docs" / "wire.md").read_text()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenizerProcess]:
    with tokenizer_process(byte_checkpoint(tmp_path_factory.mktemp("wire"))) as process:
        yield process


@pytest.fixture
def raw(engine: TokenizerProcess) -> Iterator[RawClient]:
    with RawClient(engine.address) as client:
        yield client


def test_the_document_s_own_program_runs_without_tercet(engine: TokenizerProcess, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", WIRE, re.DOTALL)
    assert "tercet" not in code
    script = tmp_path / "client.py"
    script.write_text(code)
    # -I: neither the working folder nor the user's paths are importable.
    program = subprocess.Popen(
        [sys.executable, "-I", str(script), engine.address], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    submit = engine.next_submit(30)
    assert (submit.sampling.temperature, submit.sampling.max_tokens) == (0, 40)
    engine.sample(submit.number, "Größe: Paris", Ended(submit.number, "length", None, USAGE))
    out, err = program.communicate(timeout=30)
    assert program.returncode == 0, err
    assert out.decode() == "Größe: Paris\n"
    assert b"tiny, context of 512 tokens" in err
    assert b"length after 5 tokens" in err


def test_every_kind_of_request(engine: TokenizerProcess, raw: RawClient) -> None:
    raw.ask("Hello")
    formats, more = ["none", "none", [EOS]], [0, 0, 0, [], None, [], 0, 0, 0, 0, "tiny", False]
    assert raw.receive() == ["EngineInfo", "tiny", "0.1.0", 512, 257, 0, 0, 99, 100, 0, 0, 0, 0, *formats, *more]
    ids = struct.pack("<3i", 5, 6, 7)
    requests = [
        ("Generate", "a", "hi"),
        ("GenerateIds", "b", ids, {"seed": 9}, "salt"),
        ("Chat", "c", [{"role": "user", "content": "x"}], {}, ""),
    ]
    for request in requests:
        raw.ask(*request)
        submit = engine.next_submit()
        if request[0] == "GenerateIds":
            assert (submit.prompt_ids, submit.sampling.seed, submit.cache_salt) == (ids, 9, "salt")
        engine.sample(submit.number, "ok</s>", Ended(submit.number, "stop", EOS, USAGE))
        text, token_ids = "", b""
        for kind, request_id, *fields in raw.items():
            assert request_id == request[1]
            text += fields[0]
            token_ids += fields[1]
            if kind == "Finished":
                assert fields[2:] == ["stop", EOS, list(msgspec.structs.astuple(USAGE)), 0]
                break
            assert kind == "Delta"
        assert text == "ok"
        assert len(token_ids) == 12


def test_questions(engine: TokenizerProcess, raw: RawClient) -> None:
    raw.ask("Tokenize", "q", ["Generate", "", "hé"])
    kind, name, token_ids = raw.receive()
    assert (kind, name, len(token_ids)) == ("Tokenized", "q", 4 * 3)
    raw.ask("Detokenize", "r", token_ids + struct.pack("<i", EOS))
    assert raw.receive() == ["Detokenized", "r", "hé</s>"]
    raw.ask("Tokenize", "s", ["Chat", "", [{"role": "user", "content": "x" * 3000}]])  # too long to do on the side
    kind, name, token_ids = raw.receive()
    assert (kind, name, len(token_ids)) == ("Tokenized", "s", 4 * (3000 + len("<|user|><|assistant|>")))
    raw.ask("Tokenize", "t", ["Generate", "", "x" * 20_000])  # far more than fits, as can be seen from outside
    assert raw.receive()[:3] == ["Failed", "t", "prompt_too_long"]
    raw.ask("Detokenize", "t", struct.pack("<i", 257))
    assert raw.receive()[:3] == ["Failed", "t", "invalid_request"]
    raw.ask("Detokenize", "u", b"123")
    assert raw.receive()[:3] == ["Failed", "u", "invalid_request"]
    raw.ask("Tokenize", "v", ["GenerateIds", "", b""])
    assert raw.receive()[:3] == ["Rejected", "v", "bad_message"]
    assert not engine.has_message()


def test_cancel_ends_with_finished(engine: TokenizerProcess, raw: RawClient) -> None:
    raw.ask("Generate", "a", "hi")
    submit = engine.next_submit()
    raw.ask("Cancel", "a")
    (kind, request_id, text, token_ids, reason, stop, usage, index) = next(raw.items())
    assert (kind, request_id, text, token_ids, reason, stop, index) == ("Finished", "a", "", b"", "cancelled", None, 0)
    assert usage[0] == 2
    abort = engine.next_message()
    assert isinstance(abort, Abort)
    assert abort.numbers == struct.pack("<q", submit.number)


def test_several_answers(engine: TokenizerProcess, raw: RawClient) -> None:
    raw.ask("Generate", "a", "hi", {"n": 3, "seed": 2**63 - 2, "prompt_logprobs": 1})
    submit = engine.next_submit()
    assert submit.sampling.seed == 2**63 - 2
    assert [one.seed for one in submit.siblings] == [2**63 - 1, 0]
    numbers = [submit.number, *(one.number for one in submit.siblings)]
    for number, text in zip(numbers, ("one", "two", "three"), strict=True):
        engine.sample(number, text, Ended(number, "length", None, USAGE))
    texts, ends = ["", "", ""], []
    for kind, request_id, text, *fields in raw.items():
        assert request_id == "a"
        texts[fields[-1]] += text
        if kind == "Finished":
            ends.append(fields[-1])
            if len(ends) == 3:
                break
    assert texts == ["one", "two", "three"]
    assert sorted(ends) == [0, 1, 2]
    # Again on a new connection: the second has ended.
    again = {"received_ids": [struct.pack("<i", 5), None, b""]}
    raw.ask("Generate", "a", "hi", {"n": 3, "seed": 7}, "", again)
    submit = engine.next_submit()
    assert (submit.sampling.seed, submit.generated_ids, submit.again) == (7, struct.pack("<i", 5), True)
    ((number, seed, generated_ids),) = [(one.number, one.seed, one.generated_ids) for one in submit.siblings]
    assert (seed, generated_ids) == (9, b"")
    raw.ask("Cancel", "a")
    (_, ends) = raw.receive()
    assert [(kind, reason, index) for kind, _, _, _, reason, _, _, index in ends] == [
        ("Finished", "cancelled", 0),
        ("Finished", "cancelled", 2),
    ]
    abort = engine.next_message()
    assert isinstance(abort, Abort)
    assert abort.numbers == struct.pack("<2q", submit.number, number)


@pytest.mark.parametrize(
    ("request_", "kind", "code"),
    [
        (("Generate", "a", "hi", {"temprature": 1}), "Rejected", "bad_message"),
        (("Generate", "a", "hi", {}, "", 1), "Rejected", "bad_message"),
        (("Generate", "", "hi"), "Rejected", "bad_request_id"),
        (("Generate", "a", "hi", {"spaces_between_special_tokens": False}), "Failed", "not_supported"),
        (("Generate", "a", "hi", {"n": 257}), "Failed", "invalid_request"),
        (("Generate", "a", "hi", {"top_p": 0}), "Failed", "invalid_request"),
        (("Generate", "a", "hi", {"adapter": "sql"}), "Failed", "invalid_request"),
        (("Embed", "a", "hi", {"adapter": "sql"}), "Failed", "invalid_request"),
        (("Classify", "a", "hi"), "Failed", "not_supported"),
        (("Generate", "a", "h" * 512), "Failed", "prompt_too_long"),
        (("Generate", "a", "h" * 500, {"max_tokens": 13}), "Failed", "too_long_for_context"),
    ],
)
def test_codes(raw: RawClient, request_: tuple[Any, ...], kind: str, code: str) -> None:
    raw.ask(*request_)
    answer = raw.receive()
    assert answer[:3] == [kind, request_[1], code]
    assert f"| `{code}` | {kind} |" in WIRE


@pytest.mark.parametrize(
    ("words", "limits"),
    [
        ("A message may have {} MiB, of which at most {} MiB", [MAX_MESSAGE_BYTES // 2**20, MAX_PLAIN_BYTES // 2**20]),
        ("may have {:,} lists and maps together", [part_count.MAX_PARTS]),
        ("A client that leaves {:,} messages unread", [front_door._UNREAD_BATCHES]),
        ("`request_id` is 1 to {} characters", [request_check.MAX_NAME_LENGTH]),
        ("a conversation of 1 to {:,} messages", [messages.MAX_CHAT_MESSAGES]),
        ("at most {} functions", [prompt_check.MAX_TOOLS]),
        ("up to {:,} token ids, -{:.0f} to 100 each", [logits_check.MAX_BIASES, logits_check._LARGEST_BIAS]),
        ("0 to {}: say how likely", [messages.MAX_LOGPROBS]),
        ("At most {:,} bytes, {:,} choices, {} levels", [
            structured_check.MAX_GRAMMAR_BYTES, structured_check.MAX_CHOICES, structured_check._MAX_DEPTH,
        ]),
        ("1 to {} answers to the same prompt", [messages.MAX_ANSWERS]),
        ("up to {} strings of 1 to {:,} characters", [request_check.MAX_STOP_STRINGS, request_check.MAX_STOP_LENGTH]),
        ("end-of-sequence ids at most {}", [request_check.MAX_STOP_IDS]),
        ("over 0, at most {:,}", [request_check._MAX_SECONDS]),
        ("of at most {:,} pixels, none of whose sides is more than {} times", [
            images._MOST_PIXELS, image_sizes._MOST_STRETCHED,
        ]),
        ("A request may bring {}", [ImageLimits().image]),
        ("run have {} GiB of pixels together", [outstanding._MOST_IMAGE_BYTES // 2**30]),
        ("it has decoded, {} MiB of pixels", [kept_images._MOST_BYTES // 2**20]),
    ],
)  # fmt: skip
def test_limits_are_those_of_the_code(words: str, limits: list[float]) -> None:
    assert words.format(*limits) in " ".join(WIRE.split())


def test_the_tables_name_every_message_and_field() -> None:
    for union in (messages.FromClient, answers.ToClient | answers.Batch.__annotations__["items"].__args__[0]):
        for kind in union.__args__:
            fields = [field.name for field in msgspec.structs.fields(kind)]
            row = ", ".join([f'"{kind.__name__}"', *fields])
            assert f"`[{row}]`" in WIRE
    for described in (
        messages.SamplingParams,
        messages.EmbeddingParams,
        messages.ClassificationParams,
        messages.Handling,
        messages.ChatMessage,
        messages.ChatOptions,
    ):
        for field in msgspec.structs.fields(described):
            assert f"| `{field.name}` |" in WIRE or f"`{field.name}` (" in WIRE
    usage = [field.name for field in msgspec.structs.fields(answers.Usage)]
    assert f"`[{', '.join(usage)}]`" in WIRE.replace("\n", " ")
