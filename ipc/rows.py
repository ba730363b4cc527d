"""Log-probabilities of many tokens. They are kept packed, in a tenth of the memory, until somebody looks at them."""

from collections.abc import Iterable, Sequence
from typing import overload

import msgspec

from tercet.ipc.answers import TokenLogprob

Row = tuple[TokenLogprob, ...]
"""Of one token: itself, then the likeliest in its place."""

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Row).decode


class PackedRows(Sequence[Row]):
    """Like a list to look at; each look unpacks what is looked at."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._packed: list[bytes] = []
        self.extend(rows)

    def extend(self, rows: Iterable[Row]) -> None:
        self._packed += map(_pack, rows)

    def __len__(self) -> int:
        return len(self._packed)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        if isinstance(place, slice):
            return [_unpack(one) for one in self._packed[place]]
        return _unpack(self._packed[place])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == list(other)

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return repr(self[:])
