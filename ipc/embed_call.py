"""What a client gets back who asked for an embedding, or what a head makes of a prompt. It knows no socket."""

from abc import abstractmethod
from array import array
from typing import TypeVar

import msgspec

from tercet.ipc.answers import Classified, Embedded, Finished, News, Usage
from tercet.ipc.errors import RequestRefused
from tercet.ipc.messages import Request
from tercet.ipc.pending import Pending


class Embedding(msgspec.Struct, frozen=True):
    """Of one prompt."""

    values: "array[float]"
    """fp32; `numpy.asarray` and `torch.tensor` take it as it is, `list` makes floats of it."""
    usage: Usage


class Classification(msgspec.Struct, frozen=True):
    """Of one prompt."""

    logits: "array[float]"
    """fp32, one for each of `EngineInfo.classifier`'s labels."""
    usage: Usage


Made = TypeVar("Made", Embedding, Classification)


class _VectorCall(Pending[Made]):
    """One request in the making, whose answer comes at once."""

    def __init__(self, request: Request, timeout: float | None) -> None:
        super().__init__(request, timeout)
        self._made: Made | None = None

    @abstractmethod
    def _read(self, item: News) -> Made | None:
        """The answer, if this is it."""

    def take(self, item: News) -> bool:
        if isinstance(item, Finished):  # cancelled, by whom ever
            self.fail(RequestRefused("cancelled", "the request was cancelled"))
            return True
        self._made = self._read(item)
        if self._made is None:
            return False
        self._announce()
        return True

    def _rest(self) -> Request:
        return self.request

    async def whole(self) -> Made:
        """The answer."""
        await self.in_time(self._news())
        if self._error is not None:
            raise self._error
        assert self._made is not None
        return self._made


class EmbedCall(_VectorCall[Embedding]):
    """For an embedding."""

    def _read(self, item: News) -> Embedding | None:
        return Embedding(array("f", item.values), item.usage) if isinstance(item, Embedded) else None


class ClassifyCall(_VectorCall[Classification]):
    """For logits."""

    def _read(self, item: News) -> Classification | None:
        return Classification(array("f", item.logits), item.usage) if isinstance(item, Classified) else None
