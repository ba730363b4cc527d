"""Images that were decoded a while ago: a chat's next turn brings those of all its turns again. It knows no file."""

import threading
from collections import OrderedDict
from hashlib import blake2b

from tercet.engine.images import Pixels

_MOST_BYTES = 256 << 20


class KeptImages:
    """By name, the least recently used going first. Thread-safe."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Pixels] = OrderedDict()
        self.num_bytes = 0
        """Of their pixels."""

    def find(self, name: bytes) -> Pixels | None:
        with self._lock:
            if (pixels := self._kept.get(name)) is not None:
                self._kept.move_to_end(name)
            return pixels

    def keep(self, name: bytes, pixels: Pixels) -> None:
        """Unless it is too large by itself."""
        if len(pixels.values) > self._most_bytes:
            return
        with self._lock:
            if name in self._kept:  # another thread was as fast
                return
            self._kept[name] = pixels
            self.num_bytes += len(pixels.values)
            while self.num_bytes > self._most_bytes:
                self.num_bytes -= len(self._kept.popitem(last=False)[1].values)


def name_of(file: bytes, salt: str) -> bytes:
    """Who does not know the salt cannot tell, by the time it takes, which images have come before."""
    return blake2b(file, digest_size=32, key=blake2b(salt.encode()).digest()).digest()
