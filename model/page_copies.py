"""Copies whole pages between the KV cache and the host's memory, of many layers at once; and states, which lie alike.

On a GPU by its copy engines, through the driver's C interface: PyTorch has no copy of several lines, and a kernel that
copies takes multiprocessors from the steps beside it. The host's memory has to be pinned.

A page lies in one piece on the host, and here in as many lines as there are layers and parts, each as far from the next
as all pages take. Whose pages they are is the scheduler's matter. For a state read page, for its place among those of
slots: its layers are lines, too.
"""

import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ON_HOST, _ON_DEVICE = 1, 2
"""CUmemorytype."""


class PageCopies:
    """`kv_cache`: of layers that hold as much, [layer, k/v, page, ...]. `host_pages`: [place, layer, k/v, ...], of a
    memory that is pinned piece by piece of `piece` bytes; what is of one place lies together."""

    def __init__(self, kv_cache: Tensor, host_pages: Tensor, piece: int) -> None:
        self._kv_cache, self._host_pages, self._piece = kv_cache, host_pages, piece
        self._num_lines = math.prod(kv_cache.shape[:2])
        self._width = math.prod(kv_cache.shape[3:]) * kv_cache.itemsize
        self.num_bytes = self._num_lines * self._width
        """Of a page."""
        self._first = int(host_pages.storage_offset()) * kv_cache.itemsize
        self._apart = host_pages.stride(0) * kv_cache.itemsize
        if kv_cache.is_cuda:
            self._copy = ctypes.CDLL("libcuda.so.1").cuMemcpy3DAsync_v2
            self._copy.argtypes = ctypes.POINTER(_Copy), ctypes.c_void_p

    def store(self, pairs: Sequence[Sequence[int]]) -> None:
        """Of each pair, copy the page over the place; no place stands in two pairs."""
        if self._kv_cache.is_cuda:
            self._begin(pairs, device="src", host="dst")
        else:
            pages_P, places_P = torch.tensor(pairs).unbind(1)
            self._host_pages[places_P] = self._kv_cache[:, :, pages_P].movedim(2, 0)

    def load(self, pairs: Sequence[Sequence[int]]) -> None:
        """Of each pair, copy the place over the page; no page stands in two pairs."""
        if self._kv_cache.is_cuda:
            self._begin([(page, place) for place, page in pairs], device="dst", host="src")
        else:
            places_P, pages_P = torch.tensor(pairs).unbind(1)
            self._kv_cache[:, :, pages_P] = self._host_pages[places_P].movedim(0, 2)

    def _begin(self, pairs: Sequence[Sequence[int]], device: str, host: str) -> None:
        """Of each page and place. `device` and `host` say which of them is the source, and which the destination.

        Each line is a plane of one line: planes may be as far apart as they want, lines of a plane may not.
        """
        stream = torch.cuda.current_stream().cuda_stream
        copy = _Copy(Height=1)
        for side, kind, height in ((device, _ON_DEVICE, self._kv_cache.shape[2]), (host, _ON_HOST, 1)):
            setattr(copy, f"{side}MemoryType", kind)
            setattr(copy, f"{side}Pitch", self._width)
            setattr(copy, f"{side}Height", height)
        of_device, of_host = f"{device}Device", f"{host}Host"
        for page, place in pairs:
            for on_device, on_host, copy.WidthInBytes, copy.Depth in self._parts(page, place):
                setattr(copy, of_device, on_device)
                setattr(copy, of_host, on_host)
                if error := self._copy(copy, stream):
                    raise RuntimeError(
                        f"a copy of a page between device and host could not be begun: CUDA error {error}"
                    )

    def _parts(self, page: int, place: int) -> Iterator[tuple[int, int, int, int]]:
        """Of each copy the addresses on the device and on the host, how long its lines are and how many."""
        device = self._kv_cache.data_ptr() + page * self._width
        apart = self._kv_cache.shape[2] * self._width
        start = self._first + place * self._apart
        host = self._host_pages.untyped_storage().data_ptr() + start
        for line, first, width, num_lines in parts_in_pieces(start, self._num_lines, self._width, self._piece):
            yield device + line * apart + first, host + line * self._width + first, width, num_lines


class Part(NamedTuple):
    """`num_lines` lines of a page from `line` on, of each the bytes from `first` on, `width` of them."""

    line: int
    first: int
    width: int
    num_lines: int


def parts_in_pieces(start: int, num_lines: int, width: int, piece: int) -> Iterator[Part]:
    """What a page is copied in: each of these lies in one pinned piece of the host's memory, for a copy may not go over
    two. The page begins at byte `start` of that, and has `num_lines` lines of `width` bytes."""
    at, end = start, start + num_lines * width
    while at < end:
        line, first = divmod(at - start, width)
        left = min(end, (at // piece + 1) * piece) - at
        if not first and left >= width:
            part = Part(line, 0, width, left // width)
        else:
            part = Part(line, first, min(left, width - first), 1)
        yield part
        at += part.width * part.num_lines


class _Copy(ctypes.Structure):
    """CUDA_MEMCPY3D_v2."""

    _fields_ = (
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcZ", ctypes.c_size_t),
        ("srcLOD", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_uint),
        ("srcHost", ctypes.c_void_p),
        ("srcDevice", ctypes.c_uint64),
        ("srcArray", ctypes.c_void_p),
        ("reserved0", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("srcHeight", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstZ", ctypes.c_size_t),
        ("dstLOD", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_uint),
        ("dstHost", ctypes.c_void_p),
        ("dstDevice", ctypes.c_uint64),
        ("dstArray", ctypes.c_void_p),
        ("reserved1", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("dstHeight", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
        ("Depth", ctypes.c_size_t),
    )
