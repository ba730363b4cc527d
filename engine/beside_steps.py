"""What a worker does for its supervisor beside its steps: it says whether other weights are its model's, reads them
into the places of those it has, and puts adapters into theirs.

Files are read in threads. What touches the device while steps run is done by the step loop, a little between two.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tercet.engine.child import SupervisorLink
from tercet.engine.compiler_process import open_configured
from tercet.ipc.process_messages import PlaceAdapter, ToChild, Tried, TryWeights
from tercet.ipc.step_messages import ReadWeights

if TYPE_CHECKING:
    from tercet.model.adapter_places import AdapterPlaces
    from tercet.model.adapters import LayerAdapters
    from tercet.model.decoder import Decoder
    from tercet.model.load import Opened

_LOOK_SECONDS = 0.05
"""How often a step loop that has nothing to do looks for what was read."""
_Read = tuple[PlaceAdapter, "tuple[LayerAdapters, ...]"]


class BesideSteps:
    """`gpu`: the worker's, if it has one; `decoder`: its model; `places`: for adapters, where that has some."""

    def __init__(
        self, link: SupervisorLink, gpu: int | None, decoder: "Decoder | None", places: "AdapterPlaces | None"
    ) -> None:
        self._link = link
        self._gpu = gpu
        self._decoder = decoder
        self._places = places
        self.reads_weights = False
        """Said by the step loop where it comes to that among its plans. Nothing is launched then, nor captured."""
        self._read: queue.SimpleQueue[_Read] = queue.SimpleQueue()
        self._putting: tuple[int, Iterator[None]] | None = None
        link.subscribe(self._obey)

    def patience(self, seconds: float) -> float:
        """How long the step loop may wait for a plan that would wait for so long."""
        if self._putting is not None:
            return 0.0
        return seconds if self._places is None else min(seconds, _LOOK_SECONDS)

    def work(self) -> None:
        """Called by the step loop, between two steps: does a little."""
        if self._putting is None:
            if self._read.empty():
                return
            order, adapter = self._read.get()
            assert self._places is not None
            self._putting = order.number, self._places.put(order.place, adapter)
        number, putting = self._putting
        if next(putting, self) is self:
            self._putting = None
            self._link.tell(Tried(number, None))

    def read_weights(self, order: ReadWeights) -> None:
        """Called once nothing needs those that there are: steps that were launched before may still run."""
        self._in_thread(order.number, lambda: self._read_weights(order.path))

    def _obey(self, command: ToChild) -> None:
        """In the link's thread."""
        match command:
            case TryWeights(number=number, path=path):
                self._in_thread(number, lambda: self._try(path))
            case PlaceAdapter(number=number):
                self._in_thread(number, lambda: self._fetch(command))
            case _:
                raise AssertionError(f"the supervisor says {command!r} to a worker")

    def _in_thread(self, number: int, work: Callable[[], bool]) -> None:
        """Whose result says whether all is done."""

        def run() -> None:
            try:
                if work():
                    self._link.tell(Tried(number, None))
            except Exception as error:  # noqa: BLE001  whatever it is, the worker goes on
                said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                self._link.tell(Tried(number, said))

        threading.Thread(target=run, name="beside-steps", daemon=True).start()

    def _try(self, path: str) -> bool:
        if self._link.spec.config.load_format != "null":
            from tercet.model.weights import check_tensors

            opened = self._opened(path)
            check_tensors(opened.tensors, opened.config)
        return True

    def _read_weights(self, path: str) -> bool:
        if self._decoder is not None:
            from tercet.model.load import load_into

            load_into(self._decoder, self._opened(path))
        self.reads_weights = False
        return True

    def _opened(self, path: str) -> "Opened":
        """Weights that may take the place of the model's."""
        import torch

        device = torch.device("cpu")
        if self._gpu is not None:
            device = torch.device("cuda", self._gpu)
            torch.cuda.set_device(device)  # of this thread: whatever names none would else open the first one
        paths = msgspec.structs.replace(self._link.spec.paths, weights=path, adapters=())  # those stay as they are
        return open_configured(self._link.spec.config, paths, device)

    def _fetch(self, order: PlaceAdapter) -> bool:
        if self._places is None:
            return True
        self._read.put((order, self._places.read(Path(order.path))))
        return False
