"""scripts/chat.py with pictures, before a worker that computes nothing."""

import subprocess
import sys
from pathlib import Path

from daemon import SCRIPTS
from seeing import encoded, picture, seeing_checkpoint


def chat(model: Path, *more: str) -> tuple[int, str]:
    command = [sys.executable, str(SCRIPTS / "chat.py"), str(model), "--load-format", "null", "--device", "cpu"]
    flags = ["--max-model-len", "200", "--max-tokens", "2", "--prompt", "what is it?"]
    done = subprocess.run([*command, *flags, *more], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


def test_a_picture_with_a_question(tmp_path: Path) -> None:
    model, file = seeing_checkpoint(tmp_path / "seeing"), tmp_path / "a.png"
    file.write_bytes(encoded(picture(60, 60)))
    code, said = chat(model, "--image", str(file), "--image", str(file))
    assert (code, "tercet:" in said) == (0, False)
    code, said = chat(model, "--image", str(model / "config.json"))
    assert (code, "the prompt brings image 1 of 1, which cannot be used" in said) == (1, True)
    code, said = chat(model, "--image", "/no/such.png")
    assert (code, "No such file" in said) == (2, True)
