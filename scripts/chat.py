"""Chat with a model in the terminal: `python scripts/chat.py [MODEL]` (default: the demo model).

`/reset` forgets the conversation, `/image FILE` shows a picture with the next question, Ctrl-C stops the answer, Ctrl-D
leaves. `--prompt "…"` answers once on standard output; `--image FILE` is for the first question. When standard input is
no terminal, each of its lines is a turn, and its end is the end. What a model thinks is dim in a terminal, and stands
under headings elsewhere.
"""

import io
import os
import queue
import sys
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, suppress
from pathlib import Path

import anyio.from_thread
import msgspec

from answer_display import AnswerDisplay
from engine_flags import add_engine_flags, engine_config
from program_parser import ProgramParser
from start_up_display import StartUpDisplay
from tercet.engine.adapter_names import read_adapters
from tercet.engine.chat_reader import NO_MARKS, ChatReader
from tercet.engine.engine_process import EngineProcess
from tercet.engine.errors import TercetError
from tercet.engine.harmony import MARKS
from tercet.engine.mark_tokens import find_marks
from tercet.engine.openai_answers import ChatDelta
from tercet.engine.reasoning import answer_format, has_special_tags
from tercet.engine.standard_files import leave_standard_output, open_standard_files
from tercet.ipc.client import Client, ClientError
from tercet.ipc.content import ImagePart, Part, TextPart, as_content
from tercet.ipc.messages import ChatMessage, SamplingParams


class Conversation:
    """The turns so far, and the engine that answers them."""

    def __init__(self, client: Client, portal: anyio.from_thread.BlockingPortal, params: SamplingParams) -> None:
        self._client = client
        self._portal = portal
        self._params = params
        self._marks = NO_MARKS
        self._reasoning = answer_format(portal.call(client.info).reasoning_format)
        if self._reasoning == "harmony":  # whose marks texts may also spell
            self._marks = portal.call(find_marks, client.tokenize, MARKS)
        if self._reasoning == "harmony" or has_special_tags(self._reasoning):  # their marks are special tokens
            self._params = msgspec.structs.replace(params, skip_special_tokens=False)
        self._messages: list[ChatMessage] = []
        self._pictures: list[Part] = []
        """For the next question."""

    def reset(self) -> None:
        self._messages, self._pictures = [], []

    def show(self, file: str) -> None:
        """With the next question. Raises `OSError`."""
        self._pictures.append(ImagePart(Path(file).expanduser().read_bytes()))

    def answer(self, turn: str) -> Iterator[ChatDelta]:
        """The parts of the answer as they come. Leaving the loop early cancels the rest; what came stays said.

        A turn that was only thought about is forgotten: there are templates that refuse an answer without a text.
        """
        self._messages.append(ChatMessage("user", as_content([*self._pictures, TextPart(turn)])))
        self._pictures = []
        deltas: queue.SimpleQueue[ChatDelta | None] = queue.SimpleQueue()
        future = self._portal.start_task_soon(self._stream, tuple(self._messages), deltas)
        said: list[ChatDelta] = []
        try:
            while (delta := deltas.get()) is not None:
                said.append(delta)
                yield delta
            _result(future)
        finally:
            future.cancel()
            if content := "".join(delta.content or "" for delta in said):
                thought = "".join(delta.reasoning_content or "" for delta in said)
                self._messages.append(ChatMessage("assistant", content, reasoning_content=thought or None))
            else:
                self._messages.pop()

    async def _stream(self, messages: tuple[ChatMessage, ...], deltas: "queue.SimpleQueue[ChatDelta | None]") -> None:
        reader = ChatReader(self._reasoning, "none", None, marks=self._marks)
        try:
            async for piece in self._client.stream(messages, self._params):
                for delta in reader.feed(piece.text, piece.token_ids):
                    deltas.put(delta)
            for delta in reader.finish():
                deltas.put(delta)
        finally:
            deltas.put(None)


def _result(future: "Future[None]") -> None:
    with suppress(CancelledError):
        future.result()


def say(conversation: Conversation, turn: str) -> bool:
    """Print one answer; False if it failed."""
    display, ending = AnswerDisplay(colours=_has_colours()), ""
    try:
        for delta in conversation.answer(turn):
            print(display.show(delta), end="", flush=True)
    except KeyboardInterrupt:
        ending = " [stopped]"
    except ClientError as error:
        print(display.end(), end="", flush=True)
        print(f"\ntercet: {error}", file=sys.stderr)
        return False
    print(display.end() + ending, flush=True)
    return True


def show(conversation: Conversation, file: str) -> bool:
    """Have a picture ready; False if there is none."""
    try:
        conversation.show(file)
    except OSError as error:
        print(f"tercet: {error}", file=sys.stderr)
        return False
    return True


def _has_colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def talk(conversation: Conversation) -> None:
    """Questions and answers until Ctrl-D."""
    commands = "/reset forgets the conversation, /image FILE shows a picture with the next question"
    print(f"{commands}, Ctrl-C stops the answer, Ctrl-D leaves", file=sys.stderr)
    while True:
        try:
            turn = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if turn == "/reset":
            conversation.reset()
        elif turn.startswith("/image "):
            show(conversation, turn.removeprefix("/image ").strip())
        elif turn:
            say(conversation, turn)


def converse(conversation: Conversation, prompt: str | None) -> int:
    """With whoever is there. The program's exit code."""
    if prompt is not None:
        return 0 if say(conversation, prompt) else 1
    if sys.stdin.isatty():
        talk(conversation)
        return 0
    assert isinstance(sys.stdin, io.TextIOWrapper)
    sys.stdin.reconfigure(errors="replace")
    answered = [say(conversation, line.strip()) for line in sys.stdin if line.strip()]
    return 0 if all(answered) else 1


def main() -> int:
    open_standard_files()
    parser = ProgramParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo", help="folder, .gguf file, hub id, or `demo`")
    parser.add_argument("--prompt", help="answer this once, on standard output, and end")
    parser.add_argument("--image", metavar="FILE", action="append", default=[], help="with the first question")
    parser.add_argument("--max-tokens", type=int, help="most tokens of an answer")
    parser.add_argument("--ask", metavar="NAME", help="the adapter that answers; default: the model alone")
    parser.add_argument("--temperature", type=float, help="0 takes the likeliest token, as with `demo`")
    add_engine_flags(parser)
    arguments = parser.parse_args()
    temperature = arguments.temperature
    if temperature is None and arguments.model == "demo":
        temperature = 0.0  # a model this small rambles when it is sampled from
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=temperature, adapter=arguments.ask)
    try:
        config = engine_config(arguments.model, arguments)
    except ValueError as error:
        parser.error(str(error))
    if arguments.ask not in (None, *read_adapters(config.adapter)):
        parser.error(f"--ask got {arguments.ask!r}; want the name of an --adapter")

    display = StartUpDisplay()
    with ExitStack() as stack:
        try:
            engine = stack.enter_context(EngineProcess(config, display.show))
        except TercetError as error:
            display.close()
            print(f"tercet: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        display.close()
        print(f"{config.model} on {engine.limits.device}, ready in {engine.startup_seconds:.1f} s", file=sys.stderr)
        portal = stack.enter_context(anyio.from_thread.start_blocking_portal())
        client = stack.enter_context(portal.wrap_async_context_manager(Client(engine.address)))
        conversation = Conversation(client, portal, params)
        try:
            if not all(show(conversation, file) for file in arguments.image):
                return 2
            return converse(conversation, arguments.prompt)
        except BrokenPipeError:  # who reads the answers has left
            leave_standard_output()
            return 0


if __name__ == "__main__":
    sys.exit(main())
