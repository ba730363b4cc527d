"""scripts/chat.py with models that think: what is shown of that, and what goes back to the model.

One model writes in the harmony format: its tokenizer process is real, and the test plays the model. Of the other one
the whole program is run.
"""

import copy
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import anyio.from_thread
import pytest
from safetensors.torch import load_file, save_file

from chat import Conversation, say
from checkpoints import make_checkpoint, tokenizer
from daemon import SCRIPTS
from families import VOCAB_SIZE
from harmony_style import harmony_checkpoint, harmony_tokenizer, play
from tercet.ipc.client import Client
from tercet.ipc.messages import SamplingParams
from tercet.ipc.step_messages import Abort
from tokenizer_process import TokenizerProcess, byte_tokenizer, tokenizer_process

THOUGHT = "<|channel|>analysis<|message|>Grüße?<|end|><|start|>assistant"
ANSWER = THOUGHT + "<|channel|>final<|message|>Grüße, Welt.<|return|>"
SYSTEM = "<|start|>system<|message|>Effort: medium<|end|>"
HI = "<|start|>user<|message|>hi<|end|><|start|>assistant"


class Screen(io.StringIO):
    """Standard output, with somebody in front of it who stops an answer that ends with `stop_at`."""

    def __init__(self, *, is_terminal: bool = False, stop_at: str | None = None) -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self.stop_at = stop_at

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        length = super().write(text)
        if self.stop_at is not None and self.getvalue().endswith(self.stop_at):
            self.stop_at = None
            raise KeyboardInterrupt
        return length


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenizerProcess]:
    folder, size = harmony_checkpoint(tmp_path_factory.mktemp("harmony")), harmony_tokenizer().get_vocab_size()
    with tokenizer_process(folder, max_model_len=4096, vocab_size=size) as process:
        yield process


class Talk:
    """A conversation with a model that the test plays."""

    def __init__(self, engine: TokenizerProcess, conversation: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
        self._engine = engine
        self._conversation = conversation
        self._monkeypatch = monkeypatch

    def hear(self, says: str, screen: Screen) -> tuple[str, str]:
        """What is shown of an answer to `hi`, and the prompt that the model got. What is stopped says no more."""
        is_whole = screen.stop_at is None
        with ThreadPoolExecutor(1) as model, self._monkeypatch.context() as patch:
            prompt: Future[str] = model.submit(self._play, says, is_whole)
            patch.setattr(sys, "stdout", screen)
            assert say(self._conversation, "hi")
        if not is_whole:
            assert isinstance(self._engine.next_message(), Abort)
        return screen.getvalue(), prompt.result()

    def _play(self, says: str, is_whole: bool) -> str:
        submit = self._engine.next_submit()
        play(self._engine, submit.number, ids_of(says), is_whole=is_whole)
        prompt_ids = memoryview(submit.prompt_ids).cast("i").tolist()
        return harmony_tokenizer().decode(prompt_ids, skip_special_tokens=False)


@pytest.fixture
def talk(engine: TokenizerProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Talk]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(Client(engine.address)) as client,
    ):
        yield Talk(engine, Conversation(client, portal, SamplingParams()), monkeypatch)


def ids_of(says: str) -> list[int]:
    """What stands between « and » is spelled, marks as well."""
    parts = re.split("[«»]", says)
    return [
        token_id
        for place, part in enumerate(parts)
        for token_id in (byte_tokenizer() if place % 2 else harmony_tokenizer()).encode(part).ids
    ]


def answered(content: str) -> str:
    """A turn that the next one's prompt has."""
    return f"{HI}<|channel|>final<|message|>{content}<|end|>"


def test_harmony_in_a_pipe(talk: Talk) -> None:
    shown, prompt = talk.hear(ANSWER, Screen())
    assert (shown, prompt) == ("[thought]\nGrüße?\n[answer]\nGrüße, Welt.\n", SYSTEM + HI)
    shown, prompt = talk.hear("<|channel|>final<|message|>It is «<|end|>».<|return|>", Screen())
    assert (shown, prompt) == ("It is <|end|>.\n", SYSTEM + answered("Grüße, Welt.") + HI)


def test_harmony_in_a_terminal(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk.hear(ANSWER, Screen(is_terminal=True))[0] == "\x1b[2mGrüße?\n\x1b[22mGrüße, Welt.\x1b[22m\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert talk.hear(ANSWER, Screen(is_terminal=True))[0] == "[thought]\nGrüße?\n[answer]\nGrüße, Welt.\n"


def test_an_answer_that_is_stopped(talk: Talk) -> None:
    """What was said of it stays said. A turn that was only thought about is forgotten."""
    shown, _ = talk.hear("<|channel|>analysis<|message|>Grü", Screen(is_terminal=True, stop_at="ü"))
    assert shown == "\x1b[2mGrü\x1b[22m [stopped]\n"
    shown, prompt = talk.hear(ANSWER.partition("elt")[0], Screen(stop_at="W"))
    assert (shown, prompt) == ("[thought]\nGrüße?\n[answer]\nGrüße, W [stopped]\n", SYSTEM + HI)
    assert talk.hear(ANSWER, Screen())[1] == SYSTEM + answered("Grüße, W") + HI


SAYS = {
    "<go>": "<think>",
    "<think>": "Hm.",
    "Hm.": "</think>",
    "</think>": "Paris.",
    "Paris.": "<|im_end|>",
    "<go on>": "Yes.",
    "Yes.": "<|im_end|>",
}
"""What comes behind what."""
TEMPLATE = """{%- if messages | length == 1 -%}<go>
{%- elif messages[1].content == 'Paris.' and messages[1].reasoning_content == 'Hm.' -%}<go on>
{%- endif %}{# between <think> and </think> #}"""


def thinking_checkpoint(folder: Path) -> Path:
    """Its layers add nothing, so that each token says which is next."""
    words = copy.deepcopy(tokenizer(VOCAB_SIZE - len(SAYS)))
    words.add_tokens(list(SAYS))
    words.chat_template = TEMPLATE
    make_checkpoint("llama", folder)
    words.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"].zero_()
    for before, after in SAYS.items():
        head[words.convert_tokens_to_ids(after)] += embedding[words.convert_tokens_to_ids(before)]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_thoughts_between_tags(tmp_path: Path) -> None:
    """The program itself. The template knows whether the first turn comes back as it should."""
    model = thinking_checkpoint(tmp_path / "model")
    command = [sys.executable, str(SCRIPTS / "chat.py"), str(model), "--device", "cpu", "--temperature", "0"]
    options = ["--kv-cache-memory", "8MiB", "--max-tokens", "20"]
    done = subprocess.run([*command, *options], input="hi\nand?\n", capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "[thought]\nHm.\n[answer]\nParis.\nYes.\n"), done.stderr
