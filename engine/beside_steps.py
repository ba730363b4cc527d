"""What a worker does for its supervisor beside its steps, in a thread: it says whether other weights are its model's.

It reads what there is to know before numbers, and knows nothing of what becomes of them.
"""

import threading

import msgspec

from tercet.engine.child import SupervisorLink
from tercet.engine.compiler_process import open_configured
from tercet.ipc.process_messages import ToChild, Tried, TryWeights


def obey(link: SupervisorLink, gpu: int | None, command: ToChild) -> None:
    """Called in the link's thread. `gpu`: the worker's."""
    match command:
        case TryWeights(number=number, path=path):
            threading.Thread(target=_answer, args=(link, gpu, number, path), name="trial", daemon=True).start()
        case _:
            raise AssertionError(f"the supervisor says {command!r} to a worker")


def _answer(link: SupervisorLink, gpu: int | None, number: int, path: str) -> None:
    complaint = None
    if link.spec.config.load_format != "null":
        try:
            _try(link, gpu, path)
        except Exception as error:  # noqa: BLE001  whatever it is, the worker goes on
            complaint = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    link.tell(Tried(number, complaint))


def _try(link: SupervisorLink, gpu: int | None, path: str) -> None:
    import torch

    from tercet.model.weights import check_tensors

    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    paths = msgspec.structs.replace(link.spec.paths, weights=path)
    opened = open_configured(link.spec.config, paths, device)
    check_tensors(opened.tensors, opened.config)
