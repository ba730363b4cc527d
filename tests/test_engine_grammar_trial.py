"""What is said of a grammar is said again without another try; what the process dies of is not."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tercet.engine import grammar_trial
from tercet.engine.grammar_trial import GrammarTrial
from tercet.engine.refusal import Refusal
from tercet.ipc.messages import Structured

GOOD = [Structured(regex=f"[a-c]{{{i}}}") for i in range(1, 5)]
BAD = Structured(grammar="start: missing")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What a process was asked."""
    lines: list[bytes] = []
    ask = grammar_trial._ask

    def asked(process: object, line: bytes) -> bytes:
        lines.append(line)
        return ask(process, line)  # type: ignore[arg-type]

    monkeypatch.setattr(grammar_trial, "_ask", asked)
    return lines


def end(trial: GrammarTrial) -> None:
    assert trial._process is not None
    grammar_trial._bury(trial._process)


def test_answers_are_kept(tried: list[bytes]) -> None:
    trial = GrammarTrial()
    words = []
    for _ in range(3):
        trial.check(GOOD[0])
        with pytest.raises(Refusal, match="does not compile") as refused:
            trial.check(BAD)
        words.append(str(refused.value))
    assert len(set(words)) == 1
    assert len(tried) == 2
    end(trial)
    trial.check(GOOD[0])
    with pytest.raises(Refusal, match="does not compile"):
        trial.check(BAD)
    assert len(tried) == 2, "nobody is there to ask"


def test_who_waits_for_another_does_not_try_the_same(tried: list[bytes]) -> None:
    trial = GrammarTrial()
    with ThreadPoolExecutor(8) as pool:
        for checked in [pool.submit(trial.check, GOOD[0]) for _ in range(8)]:
            checked.result()
    assert len(tried) == 1
    end(trial)


def test_as_many_are_kept_as_there_is_room_for(tried: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "_MOST_KEPT", 3)
    trial = GrammarTrial()
    for form in (*GOOD, *GOOD[1:], GOOD[0]):
        trial.check(form)
    assert len(tried) == len(GOOD) + 1
    end(trial)


def test_what_it_died_of_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have died of something else."""
    trial = GrammarTrial()
    ask = grammar_trial._ask
    with monkeypatch.context() as patch:
        patch.setattr(grammar_trial, "_ask", lambda process, line: b"")
        with pytest.raises(Refusal, match="died of it or hung, twice"):
            trial.check(GOOD[0])
    assert grammar_trial._ask is ask
    trial.check(GOOD[0])
    end(trial)
