"""The key-value part of a GGUF file, which comes before its tensors.

It reads no tensor and knows no key. Vocabularies are lists of 100,000 strings, so reading is a plain walk over one
memory map, without an object per field.
"""

import mmap
import struct
from pathlib import Path

from tercet.engine.errors import UnsupportedModel

Value = int | float | bool | str | list["Value"]

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING = 8
_ARRAY = 9
_VERSIONS = (2, 3)


def read_metadata(path: Path) -> dict[str, Value]:
    """All keys and values. A file that is no GGUF, or ends too early, is an error that names it."""
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data).read_all()
        except (struct.error, ValueError, IndexError) as error:
            raise UnsupportedModel(f"{path} cannot be read as GGUF: {error}") from None


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read_all(self) -> dict[str, Value]:
        if self._data[:4] != b"GGUF":
            raise ValueError(f"it begins with {self._data[:4]!r}, not with GGUF")
        self._at = 4
        version = self._scalar("<I")
        if version not in _VERSIONS:
            raise ValueError(f"it has version {version}; want {' or '.join(map(str, _VERSIONS))}")
        self._scalar("<Q")  # number of tensors
        return {self._string(): self._value(int(self._scalar("<I"))) for _ in range(int(self._scalar("<Q")))}

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            element, count = int(self._scalar("<I")), int(self._scalar("<Q"))
            if element not in _SCALARS:
                return [self._value(element) for _ in range(count)]
            form = _SCALARS[element]
            values = struct.unpack_from(f"<{count}{form[1]}", self._data, self._at)
            self._at += struct.calcsize(form) * count
            return list(values)
        if kind not in _SCALARS:
            raise ValueError(f"it has a value of the unknown kind {kind}")
        return self._scalar(_SCALARS[kind])

    def _scalar(self, form: str) -> int | float | bool:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value  # type: ignore[no-any-return]

    def _string(self) -> str:
        length = int(self._scalar("<Q"))
        end = self._at + length
        if end > len(self._data):
            raise ValueError("it ends in the middle of a text")
        text = self._data[self._at : end].decode()
        self._at = end
        return text
