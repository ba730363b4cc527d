"""Copies whole pages between the KV cache and the host's memory, of all layers at once.

On a GPU by its copy engines, through the driver's C interface: PyTorch has no copy of several lines, and a kernel that
copies takes multiprocessors from the steps beside it. The host's memory has to be pinned.

A page lies in one piece on the host, and here in as many lines as there are layers and parts, each as far from the next
as all pages take. Whose pages they are is the scheduler's matter.
"""

import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ON_HOST, _ON_DEVICE = 1, 2
"""CUmemorytype."""
_MOST_BYTES_APART = 2**31 - 1
"""How far the lines of one copy may be from each other, on any GPU."""


class PageCopies:
    """`host_pages`: [place, layer, k/v, kv head, token, dim], pinned piece by piece of `piece` bytes."""

    def __init__(self, kv_cache: Tensor, host_pages: Tensor, piece: int) -> None:
        self._kv_cache, self._host_pages, self._piece = kv_cache, host_pages, piece
        self._num_lines = math.prod(kv_cache.shape[:2])
        self._width = math.prod(kv_cache.shape[3:]) * kv_cache.itemsize
        self._apart = kv_cache.shape[2] * self._width
        self._most_lines = self._num_lines if self._apart <= _MOST_BYTES_APART else 1
        if kv_cache.is_cuda:
            self._copy = ctypes.CDLL("libcuda.so.1").cuMemcpy2DAsync_v2
            self._copy.argtypes = ctypes.POINTER(_Copy), ctypes.c_void_p

    def store(self, pairs: Sequence[Sequence[int]]) -> None:
        """Of each pair, copy the page over the place; no place stands in two pairs."""
        if not self._kv_cache.is_cuda:
            pages_P, places_P = torch.tensor(pairs).unbind(1)
            self._host_pages[places_P] = self._kv_cache[:, :, pages_P].movedim(2, 0)
            return
        stream = torch.cuda.current_stream().cuda_stream
        copy = _Copy(srcMemoryType=_ON_DEVICE, srcPitch=self._apart, dstMemoryType=_ON_HOST, dstPitch=self._width)
        for page, place in pairs:
            for on_device, on_host, copy.WidthInBytes, copy.Height in self._parts(page, place):
                copy.srcDevice, copy.dstHost = on_device, on_host
                self._begin(copy, stream)

    def load(self, pairs: Sequence[Sequence[int]]) -> None:
        """Of each pair, copy the place over the page; no page stands in two pairs."""
        if not self._kv_cache.is_cuda:
            places_P, pages_P = torch.tensor(pairs).unbind(1)
            self._kv_cache[:, :, pages_P] = self._host_pages[places_P].movedim(0, 2)
            return
        stream = torch.cuda.current_stream().cuda_stream
        copy = _Copy(srcMemoryType=_ON_HOST, srcPitch=self._width, dstMemoryType=_ON_DEVICE, dstPitch=self._apart)
        for place, page in pairs:
            for on_device, on_host, copy.WidthInBytes, copy.Height in self._parts(page, place):
                copy.srcHost, copy.dstDevice = on_host, on_device
                self._begin(copy, stream)

    def _parts(self, page: int, place: int) -> Iterator[tuple[int, int, int, int]]:
        """Addresses on the device and on the host, width and height of each copy."""
        device = self._kv_cache.data_ptr() + page * self._width
        start = place * self._num_lines * self._width
        host = self._host_pages.data_ptr() + start
        for line, first, width, height in rectangles(
            start, self._num_lines, self._width, self._piece, self._most_lines
        ):
            yield device + line * self._apart + first, host + line * self._width + first, width, height

    def _begin(self, copy: "_Copy", stream: int) -> None:
        if error := self._copy(copy, stream):
            raise RuntimeError(f"a copy of a page between device and host could not be begun: CUDA error {error}")


class Rectangle(NamedTuple):
    """`height` lines of a page from `line` on, of each the bytes from `first` on, `width` of them."""

    line: int
    first: int
    width: int
    height: int


def rectangles(start: int, num_lines: int, width: int, piece: int, most_lines: int) -> Iterator[Rectangle]:
    """What a page is copied in: each of these lies in one pinned piece of the host's memory, for a copy may not go over
    two. The page begins at byte `start` of that, and has `num_lines` lines of `width` bytes."""
    at, end = start, start + num_lines * width
    while at < end:
        line, first = divmod(at - start, width)
        left = min(end, (at // piece + 1) * piece) - at
        if not first and left >= width:
            part = Rectangle(line, 0, width, min(left // width, most_lines))
        else:
            part = Rectangle(line, first, min(left, width - first), 1)
        yield part
        at += part.width * part.height


class _Copy(ctypes.Structure):
    """CUDA_MEMCPY2D_v2."""

    _fields_ = (
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_uint),
        ("srcHost", ctypes.c_void_p),
        ("srcDevice", ctypes.c_uint64),
        ("srcArray", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_uint),
        ("dstHost", ctypes.c_void_p),
        ("dstDevice", ctypes.c_uint64),
        ("dstArray", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    )
