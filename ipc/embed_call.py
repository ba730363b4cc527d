"""What a client gets back who asked for an embedding. It knows no socket."""

from array import array

import msgspec

from tercet.ipc.answers import Embedded, Finished, News, Usage
from tercet.ipc.errors import RequestRefused
from tercet.ipc.messages import EmbedRequest, Request
from tercet.ipc.pending import Pending


class Embedding(msgspec.Struct, frozen=True):
    """Of one prompt."""

    values: "array[float]"
    """fp32; `numpy.asarray` and `torch.tensor` take it as it is, `list` makes floats of it."""
    usage: Usage


class EmbedCall(Pending[Embedding]):
    """One request in the making, whose answer comes at once."""

    def __init__(self, request: EmbedRequest, timeout: float | None) -> None:
        super().__init__(request, timeout)
        self._embedding: Embedding | None = None

    def take(self, item: News) -> bool:
        match item:
            case Embedded():
                self._embedding = Embedding(array("f", item.values), item.usage)
                self._announce()
            case Finished():  # cancelled, by whom ever
                self.fail(RequestRefused("cancelled", "the request was cancelled"))
            case _:
                return False
        return True

    def _rest(self) -> Request:
        return self.request

    async def whole(self) -> Embedding:
        """Its embedding."""
        await self.in_time(self._news())
        if self._error is not None:
            raise self._error
        assert self._embedding is not None
        return self._embedding
