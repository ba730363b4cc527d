"""A real tokenizer process for tests, with its supervisor's pipes and its scheduler played by the test."""

import math
import random
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tercet.engine.child import ChildSpec, Paths, remove_sockets
from tercet.engine.config import EngineConfig
from tercet.ipc.addresses import Addresses, make_addresses
from tercet.ipc.answers import Classifier, Usage
from tercet.ipc.beyond import Logs
from tercet.ipc.process_messages import Begin, FromChild, Limits, Loaded, Serving, ToChild
from tercet.ipc.sockets import Inbox, Outbox
from tercet.ipc.step_messages import Abort, Ended, Submit, Tokens, ToTokenizer

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
USAGE = Usage(3, 5, 1, 0, 0.1, 0.2, 0.3)
EOS = 256


def byte_tokenizer() -> Tokenizer:
    """A byte-level tokenizer of 257 tokens: one for each byte, then the end of sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: token_id for token_id, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return tokenizer


def byte_checkpoint(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A folder with all that the tokenizer process reads, and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>"} | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))
    (folder / "config.json").write_text('{"eos_token_id": 256}')
    return folder


class TokenizerProcess:
    """The process, and the test's end of its pipes and sockets."""

    def __init__(self, model_path: Path, limits: Limits, config: EngineConfig, addresses: Addresses) -> None:
        self.addresses = addresses
        self.reports: list[FromChild] = []
        self._submits = Inbox[Submit | Abort](addresses.replicas[0].scheduler, Submit | Abort)
        self._tokens = Outbox(addresses.tokenizer)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tercet.engine.tokenizer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        spec = ChildSpec("tokenizer", 0, config, Paths(str(model_path)), addresses)
        self._write(msgspec.json.encode(spec))
        self.wait_for(Loaded)
        self.tell(Begin(limits))
        self.wait_for(Serving)
        threading.Thread(target=self._collect, daemon=True).start()

    @property
    def address(self) -> str:
        return self.addresses.listen[0]

    def tell(self, command: ToChild) -> None:
        self._write(msgspec.json.encode(command))

    def next_submit(self, timeout: float = 10.0) -> Submit:
        message = self.next_message(timeout)
        assert isinstance(message, Submit), message
        return message

    def next_message(self, timeout: float = 10.0) -> Submit | Abort:
        message = self._submits.receive(timeout)
        assert message is not None, "the tokenizer sent nothing"
        return message

    def has_message(self, timeout: float = 0.2) -> bool:
        """Whether something comes; it is lost."""
        return self._submits.receive(timeout) is not None

    def send(self, message: ToTokenizer) -> None:
        self._tokens.send(message)

    def sample(self, number: int, text: str, end: Ended | None = None, *, logged: bool = False) -> None:
        """One step for each byte of `text`, for one request; `logged`: with the token's log-probability."""
        token_ids = byte_tokenizer().encode(text).ids
        for i, token_id in enumerate(token_ids):
            last = end is not None and i == len(token_ids) - 1
            step = tokens({number: token_id}, end if last else None)
            if logged:  # which row, and of it a probability and a rank
                logs = Logs(array("i", [0]).tobytes(), 0, array("f", [-0.5]).tobytes() + array("i", [1]).tobytes())
                step = msgspec.structs.replace(step, logs=logs)
            self.send(step)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self._submits.close()
        self._tokens.close()

    def wait_for(self, kind: type[FromChild]) -> None:
        """Read reports until one of this kind."""
        for message in self._reports():
            if isinstance(message, kind):
                return
        raise AssertionError(f"the tokenizer ended: {self.reports}")

    def _collect(self) -> None:
        for _ in self._reports():
            pass

    def _reports(self) -> Iterator[FromChild]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message: FromChild = msgspec.json.decode(line, type=FromChild)
            self.reports.append(message)
            yield message

    def _write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()


def tokens(sampled: dict[int, int], end: Ended | None = None) -> Tokens:
    """One step's result."""
    return Tokens(array("q", sampled).tobytes(), array("i", sampled.values()).tobytes(), () if end is None else (end,))


@contextmanager
def tokenizer_process(
    model_path: Path,
    *,
    max_model_len: int = 512,
    vocab_size: int = 257,
    listen: tuple[str, ...] = (),
    adapter: tuple[str, ...] = (),
    classifier: Classifier | None = None,
) -> Iterator[TokenizerProcess]:
    """Started and serving."""
    addresses = make_addresses(1, listen)
    process = None
    try:
        limits = Limits(100, max_model_len, vocab_size, "float32", "cpu", 8, classifier=classifier)
        config = EngineConfig(model="tiny", listen=listen, adapter=adapter)
        process = TokenizerProcess(model_path, limits, config, addresses)
        yield process
    finally:
        if process is not None:
            process.close()
        remove_sockets(addresses, front_doors=True)


def rewritten(rng: random.Random, value: Any) -> Any:
    """The same message with something in it changed: a type, a size, an order."""
    strange = [None, True, -1, 2**63, 1.5, math.nan, "", "é" * 300, b"\xff", [], {}, [[[]]], {"n": 2}, {1: 2}]
    if rng.random() < 0.2:
        return rng.choice(strange)
    match value:
        case list():
            changed = [rewritten(rng, one) if rng.random() < 0.5 else one for one in value]
            if rng.random() < 0.2:
                changed.append(rng.choice(strange))
            if rng.random() < 0.1:
                changed = changed[:-1]
            return changed
        case dict():
            return {key: rewritten(rng, one) if rng.random() < 0.2 else one for key, one in value.items()}
        case _:
            return value
