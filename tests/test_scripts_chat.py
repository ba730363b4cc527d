"""scripts/chat.py on the demo model: one shot, lines from a pipe, and a terminal with Ctrl-C and /reset."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from covering import long
from daemon import SCRIPTS
from demo import demo_file

CHAT = [sys.executable, str(SCRIPTS / "chat.py"), "--device", "cpu", "--max-model-len", "1024", "--temperature", "0"]
CAPITAL, AND_THEN, GERMANY = "What is the capital of France?", "And of Germany?", "The capital of Germany is Berlin."
STORY = "Write a long story about a dragon and a knight."
"""Its answer takes long enough to be stopped."""


@pytest.fixture(scope="module", autouse=True)
def _demo() -> None:
    demo_file()


@pytest.mark.long
def test_one_shot_says_only_the_answer() -> None:
    command = [*CHAT, "demo", "--prompt", CAPITAL, "--max-tokens", "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "The capital of France is Paris.\n"
    assert "ready in" in done.stderr


@pytest.mark.long
def test_each_line_of_a_pipe_is_a_turn() -> None:
    turns = f"{CAPITAL}\n\n{AND_THEN}\n".encode() + b"\xff is no UTF-8\n"
    command = [*CHAT, "demo", "--max-tokens", "40"]
    done = subprocess.run(command, input=turns, capture_output=True, timeout=120, check=True)
    first, *others = done.stdout.decode().splitlines()
    assert "Paris" in first
    assert GERMANY in others  # it has heard the first turn


@pytest.mark.parametrize("arguments", [["--prompt", STORY], long([])])
def test_a_reader_that_leaves_early(arguments: list[str]) -> None:
    """As `head` does."""
    command = [*CHAT, "demo", *arguments, "--max-tokens", "200"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        assert chat.stderr is not None
        chat.stdin.write(f"{STORY}\n{CAPITAL}\n".encode())
        chat.stdin.close()
        assert chat.stdout.read(1)
        chat.stdout.close()
        said = chat.stderr.read().decode()
        assert chat.wait(timeout=60) == 0
    assert "Traceback" not in said
    assert "BrokenPipe" not in said


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--page-size", "3"], 2, "--page-size"),
        (["--ask", "sql"], 2, "--ask got 'sql'; want the name of an --adapter"),
        (["/no"], 1, "no such folder"),
    ],
)
def test_wrong_arguments(arguments: list[str], code: int, words: str) -> None:
    done = subprocess.run([*CHAT, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr


class Terminal:
    """chat.py with a terminal around it."""

    def __init__(self) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, CHAT)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, pattern: str, seconds: float = 60.0) -> str:
        """Read until the pattern comes; everything up to and with it."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen, re.DOTALL)):
            assert select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0], self.seen
            try:
                self.seen += os.read(self._fd, 4096).decode(errors="replace")
            except OSError:  # the other end is gone
                raise AssertionError(f"it ended; seen: {self.seen}") from None
        read, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return read

    def wait_end(self) -> int:
        deadline = time.monotonic() + 20
        while True:
            while select.select([self._fd], [], [], 0)[0]:
                try:
                    os.read(self._fd, 4096)
                except OSError:
                    break
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def close(self) -> None:
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(self._fd)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    opened = Terminal()
    yield opened
    opened.close()


def test_terminal(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.type(f"{CAPITAL}\n")
    assert "Paris" in terminal.wait_for("\n> ")
    terminal.type(f"{AND_THEN}\n")
    assert GERMANY in terminal.wait_for("\n> ")

    terminal.type(f"{STORY}\n")
    terminal.wait_for(r"knight\.\r?\n.{20}")
    terminal.type("\x03")  # Ctrl-C stops the answer
    terminal.wait_for(r" \[stopped\]\r?\n> ", seconds=10)
    time.sleep(0.3)  # Python's `input` overlooks a signal in the instant between its prompt and its reading
    terminal.type("\x03")  # and with no answer to stop, nothing
    terminal.wait_for("> ", seconds=10)

    terminal.type("/reset\n")
    terminal.wait_for("> ")
    terminal.type(f"{AND_THEN}\n")  # of what, it cannot know now
    assert GERMANY not in terminal.wait_for(r"\?\r?\n.{60}")
    terminal.type("\x03")
    terminal.wait_for(r" \[stopped\]\r?\n> ", seconds=10)

    children = psutil.Process(terminal.pid).children(recursive=True)
    assert len(children) == 4
    terminal.type("\x04")  # Ctrl-D leaves
    assert terminal.wait_end() == 0
    assert not psutil.wait_procs(children, timeout=10)[1]
