"""The processes that compute masks, and the links to them: deaths, hangs, bad grammars, tokenizers without a reader."""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from llguidance import LLMatcher

from checkpoints import checkpoint, tokenizer
from families import VOCAB_SIZE
from tercet.engine import grammar_link
from tercet.engine.child import ChildSpec, Paths, remove_sockets
from tercet.engine.config import EngineConfig
from tercet.engine.grammar_crew import GrammarCrew
from tercet.engine.grammar_link import Followed, GrammarLink
from tercet.engine.grammar_process import GrammarSpec
from tercet.ipc.addresses import Addresses, make_addresses
from tercet.ipc.grammar_messages import Allowed, Disallowed
from tercet.ipc.mask_table import map_mask_table
from tercet.ipc.sockets import Inbox

DIGITS = LLMatcher.grammar_from_regex("[0-9]{5}x")
TOKENS = {text: index for text, index in tokenizer().get_vocab().items() if len(text) == 1}


class Desk:
    """A scheduler's inbox, and the link."""

    def __init__(self, model_path: Path, num_rows: int = 8) -> None:
        self.addresses = make_addresses(1)
        self.inbox: Inbox[Allowed | Disallowed] = Inbox(self.addresses.replicas[0].scheduler, Allowed | Disallowed)
        self.table = Path(self.addresses.directory) / "masks"
        where = self.addresses.replicas[0].scheduler, str(self.table)
        spec = GrammarSpec("", *where, num_rows, str(model_path), VOCAB_SIZE)
        names = (f"ipc://{self.addresses.directory}/m{number}" for number in itertools.count())
        self.link = GrammarLink(spec, names, itertools.count(), range(8))

    def wait(self, done: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, "no answer"
            self.link.check()
            if (message := self.inbox.receive(0.1)) is not None:
                self.link.take(message)

    def process(self) -> psutil.Process:
        assert self.link._process is not None
        return psutil.Process(self.link._process.pid)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk(checkpoint("llama3"))
    yield desk
    if desk.link._process is not None:
        desk.link._process.kill()
        desk.link._process.wait()
    desk.inbox.close()
    remove_sockets(desk.addresses, front_doors=False)


def allowed(desk: Desk, followed: Followed) -> set[str]:
    assert followed.has_mask
    words = map_mask_table(desk.table, VOCAB_SIZE)[followed.row]
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return {text for text, index in TOKENS.items() if bits[index]}


@pytest.mark.usefixtures("strange_folder")
def test_modules_in_the_working_folder_are_nobody_s(desk: Desk) -> None:
    followed = desk.link.follow(DIGITS, [])
    desk.wait(lambda: followed.has_mask or followed.failure is not None)
    assert followed.failure is None


def test_masks_go_on_after_deaths(desk: Desk) -> None:
    two = [desk.link.follow(DIGITS, []) for _ in range(2)]
    desk.wait(lambda: all(one.has_mask for one in two))
    for count in range(5):
        assert all(allowed(desk, one) == set("0123456789") for one in two)
        if count in (1, 3):  # the answers that it knows, and that it has just been asked about
            desk.process().kill()
        for one in two:
            one.has_mask = False
        desk.link.extend([(one, TOKENS["7"]) for one in two])
        desk.wait(lambda: all(one.has_mask for one in two))
    assert all(allowed(desk, one) == {"x"} for one in two)
    desk.link.release(two[0])
    assert len(desk.link._known) == 1


def test_what_hangs_is_replaced_and_then_given_up(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    innocent = desk.link.follow(DIGITS, [])
    desk.wait(lambda: innocent.has_mask)
    monkeypatch.setattr(grammar_link, "_MOST_SECONDS", 0.3)
    desk.process().send_signal(signal.SIGSTOP)
    first, second = desk.link.follow(DIGITS, []), desk.link.follow(DIGITS, [])
    gone = []
    while first.failure is None:
        process = desk.process()
        process.send_signal(signal.SIGSTOP)
        gone.append(process.pid)
        time.sleep(0.35)
        desk.link.check()
    assert "died of it twice" in first.failure
    assert len(set(gone)) == 2
    assert second.failure is None
    monkeypatch.setattr(grammar_link, "_MOST_SECONDS", 60.0)
    innocent.has_mask = False
    desk.link.extend([(innocent, TOKENS["1"])])
    desk.wait(lambda: innocent.has_mask and second.has_mask)
    assert not any(psutil.pid_exists(pid) for pid in gone)


def test_it_ends_with_its_scheduler(desk: Desk) -> None:
    followed = desk.link.follow(DIGITS, [])
    desk.wait(lambda: followed.has_mask)
    process, pipe = desk.process(), desk.link._process
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # the terminal's: nothing happens
        process.send_signal(number)
    followed.has_mask = False
    desk.link.extend([(followed, TOKENS["1"])])
    desk.wait(lambda: followed.has_mask)
    assert pipe is not None
    assert pipe.stdin is not None
    pipe.stdin.close()
    assert pipe.wait(20) == 0
    desk.link._process = None


def test_what_cannot_be_followed(desk: Desk) -> None:
    bad, good = desk.link.follow("no grammar at all {", []), desk.link.follow(DIGITS, [])
    never = desk.link.follow(DIGITS, [TOKENS["a"]])
    desk.wait(lambda: good.has_mask and bad.failure is not None and never.failure is not None)
    assert bad.failure is not None
    assert "structured cannot be followed" in bad.failure


def test_a_tokenizer_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    assert "checkpoint's tokenizer" in why_not(Desk(tmp_path))


def test_a_disk_without_room_for_masks() -> None:
    reason = why_not(Desk(checkpoint("llama3"), num_rows=2**45))
    assert reason.startswith("structured: grammars cannot be used: [Errno ")


def why_not(desk: Desk) -> str:
    """What whoever has a grammar is told."""
    followed = desk.link.follow(DIGITS, [])
    desk.wait(lambda: followed.failure is not None)
    assert followed.failure is not None
    process = desk.link._process
    assert process is not None
    process.kill()
    process.wait()
    desk.inbox.close()
    remove_sockets(desk.addresses, front_doors=False)
    return followed.failure


def scheduler_spec(addresses: Addresses, incarnation: int = 0) -> ChildSpec:
    config, paths = EngineConfig(model="m"), Paths(str(checkpoint("llama3")))
    return ChildSpec("scheduler", 0, config, paths, addresses, incarnation)


class CrewDesk:
    """A scheduler's inbox, and a crew of three."""

    def __init__(self, most: int) -> None:
        self.addresses = make_addresses(1)
        self.inbox: Inbox[Allowed | Disallowed] = Inbox(self.addresses.replicas[0].scheduler, Allowed | Disallowed)
        self.crew = GrammarCrew(scheduler_spec(self.addresses), VOCAB_SIZE, most)
        assert len(self.crew._links) == 3

    def wait(self, answers: Iterable[Followed]) -> None:
        deadline = time.monotonic() + 60
        while not all(one.has_mask or one.failure for one in answers):
            assert time.monotonic() < deadline, "no answer"
            self.crew.check()
            if (message := self.inbox.receive(0.1)) is not None:
                self.crew.take(message)

    def allowed(self, followed: Followed) -> set[str]:
        words = map_mask_table(Path(self.crew.mask_table), VOCAB_SIZE)[followed.row]
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        return {text for text, index in TOKENS.items() if bits[index]}


@pytest.fixture
def crew_desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], CrewDesk]]:
    """Makes one that follows at most so many answers."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(10)))
    made: list[CrewDesk] = []

    def make(most: int) -> CrewDesk:
        made.append(CrewDesk(most))
        return made[-1]

    yield make
    for desk in made:
        for link in desk.crew._links:
            if link._process is not None:
                link._process.kill()
                link._process.wait()
        desk.inbox.close()
        remove_sockets(desk.addresses, front_doors=False)


def only(letter: str) -> str:
    """A grammar."""
    return LLMatcher.grammar_from_regex(f"{letter}{{4}}x|q{letter}")


def test_a_crew_goes_on_after_the_death_of_any(crew_desk: Callable[[int], CrewDesk]) -> None:
    """Three processes and one table: each answer gets its own masks, also while others begin, end and die."""
    desk, draw = crew_desk(12), random.Random(5)
    answers: dict[Followed, str] = {}
    for turn in range(40):
        while len(answers) < 12:
            letter = draw.choice("abcdefgh")
            answers[desk.crew.follow(only(letter), [])] = letter
        desk.wait(answers)
        if turn % 13 == 7:
            process = draw.choice(desk.crew._links)._process
            assert process is not None
            process.kill()
        extended = []
        for one, letter in list(answers.items()):
            said = len(one.token_ids)
            assert desk.allowed(one) == ({letter, "q"} if not said else {letter} if said < 4 else {"x"})
            if said == 4 or draw.random() < 0.1:
                desk.crew.release(one)
                del answers[one]
            elif draw.random() < 0.7:
                one.has_mask = False
                extended.append((one, TOKENS[letter]))
        desk.crew.extend(extended)


def test_who_is_slow_writes_over_nobody_s_mask(crew_desk: Callable[[int], CrewDesk]) -> None:
    """A process stands still with a question of somebody who has gone, and goes on once all rows have others."""
    desk = crew_desk(3)
    gone = desk.crew.follow(only("a"), [])
    desk.wait([gone])
    (slow,) = (link for link in desk.crew._links if link._known)
    assert slow._process is not None
    slow._process.send_signal(signal.SIGSTOP)
    desk.crew.extend([(gone, TOKENS["a"])])
    desk.crew.release(gone)
    answers = {desk.crew.follow(only(letter), []): letter for letter in "bcd"}
    behind = set(slow._known.values())
    assert len(behind) == 1
    desk.wait(answers.keys() - behind)
    slow._process.send_signal(signal.SIGCONT)
    desk.wait(answers)
    for one, letter in answers.items():
        assert desk.allowed(one) == {letter, "q"}


def test_tables_of_schedulers_long_gone_are_forgotten(tmp_path: Path) -> None:
    """But not that of the last, whose plans may be on their way still."""
    addresses = msgspec.structs.replace(make_addresses(1), directory=str(tmp_path))
    for name in ("masks-0-0", "masks-0-9", "masks-0-9k2x", "masks-0-10", "masks-1-0", "masks-10-0"):
        (tmp_path / name).touch()
    GrammarCrew(scheduler_spec(addresses, 12), VOCAB_SIZE, 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["masks-0-10", "masks-1-0", "masks-10-0"]
