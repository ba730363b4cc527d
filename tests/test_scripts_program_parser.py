"""How programs read their arguments: whole flags, defaults in the help, and what is wrong said in a line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trace_picture
import tune
import tune_step
from program_parser import ProgramParser

SCRIPTS = Path(__file__).parent.parent / "scripts"
PROGRAMS = {path.name for path in SCRIPTS.glob("*.py") if "= ProgramParser(" in path.read_text()}


def test_every_program_has_this_parser() -> None:
    assert {"serve.py", "chat.py", "bench.py", "top.py", "tune.py", "tune_step.py"} <= PROGRAMS
    assert not [path.name for path in SCRIPTS.glob("*.py") if "= argparse.ArgumentParser(" in path.read_text()]


def test_flags_are_whole_words(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ProgramParser()
    parser.add_argument("--requests", type=int)
    command = parser.add_subparsers().add_parser("run")
    command.add_argument("--rounds", type=int)
    assert parser.parse_args(["--requests=3", "run", "--rounds", "4"]).rounds == 4
    for words in (["--req=3", "run"], ["run", "--rou=4"]):
        with pytest.raises(SystemExit):
            parser.parse_args(words)
        assert "unrecognized arguments: --r" in capsys.readouterr().err


def test_help_tells_defaults_that_say_something() -> None:
    parser = ProgramParser(description="As it\nwas written.")
    parser.add_argument("--at", type=float, default=0.0, help="where")
    parser.add_argument("--name", help="what")
    parser.add_argument("--all", action="store_true", help="more")
    parser.add_argument("--key", default="secret", help="default: KEY")
    text = parser.format_help()
    assert "As it\nwas written." in text
    assert re.search(r"where \(default: 0\.0\)\n", text)
    assert re.search(r"what\n.*more\n", text)
    assert "secret" not in text


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("tune.py time --rows 1,a", "argument --rows: '1,a'; want numbers with commas between them"),
        ("tune.py count --products 8b.down,mine", "--products got mine; want some of 0.6b."),
        ("tune.py measure", "`tune.py measure` found no NVIDIA GPU; want one"),
        ("tune.py time", "`tune.py time` found no NVIDIA GPU; want one"),
        ("tune.py select --log gone.jsonl", "--log is gone.jsonl, and there is no such file; want one that `tune.py"),
        ("tune_step.py", "`tune_step.py measure` found no NVIDIA GPU; want one"),
        ("tune_step.py time --alone", "`tune_step.py time` found no NVIDIA GPU; want one"),
        ("tune_step.py count --rows x", "argument --rows: 'x'; want numbers with commas between them"),
        ("tune_step.py count --products mine", "--products got mine; want some of gate_up, norm_gate_up, down, qkv,"),
        ("tune_step.py count --model ./gone", "model './gone': no such folder or file"),
        ("tune_step.py count --tensor-parallel-size 3", "--tensor-parallel-size is 3"),
        ("trace_picture.py gone.json out.svg", "No such file or directory: 'gone.json'"),
        ("trace_picture.py text.json out.svg", "text.json is no trace; want one that bench.py"),
        ("trace_picture.py list.json out.svg", "list.json is no trace; want one that bench.py"),
        ("trace_picture.py trace.json out.svg", "nothing happened between 0 and 10 ms of this trace"),
        ("trace_picture.py trace.json out.svg --for 0", "--for is 0; want more than 0"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    words: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.json").write_text("# no JSON")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": []}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", words.split())
    programs = {"tune.py": tune.main, "tune_step.py": tune_step.main, "trace_picture.py": trace_picture.main}
    with pytest.raises(SystemExit) as ended:
        programs[words.split()[0]]()
    assert ended.value.code == 2
    assert error in capsys.readouterr().err.splitlines()[-1]


def test_a_key_of_the_environment_is_not_told() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "serve.py", "--help"],
        env={**os.environ, "TERCET_LISTEN_KEY": "very-secret"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "--listen-key" in done.stdout
    assert "very-secret" not in done.stdout
