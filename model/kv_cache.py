"""The pages that hold keys and values: how many fit, and the tensors they are.

Knows bytes and shapes; which page belongs to whom is the scheduler's matter.
"""

import logging
import mmap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from tercet.model.cache_tables import CacheTables, one_table
from tercet.model.config import ModelConfig
from tercet.model.parallel import Group
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.dispatch import gpu_of

_LOG = logging.getLogger(__name__)

CPU_BYTES = 2**30
"""What a CPU rank takes without --kv-cache-memory."""

FP8_CAPABILITY = 89
"""Of the first GPUs that convert it."""

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


@dataclass(frozen=True)
class KvCache:
    """Of one rank. A page is as many tokens in every layer that has it, whatever a layer holds of them."""

    layers: tuple[Tensor, ...]
    """Of each layer that attends, what it attends to: [k/v, page, kv head, token, dim]."""
    blocks: tuple[Tensor, ...]
    """The same memory, to be copied: of the layers that hold as much, [layer, k/v, page, kv head, token, dim]."""

    @property
    def device(self) -> torch.device:
        return self.blocks[0].device


def num_pages_of(layers: Sequence[Tensor]) -> int:
    return layers[0].shape[1]


def page_size_of(layers: Sequence[Tensor]) -> int:
    return layers[0].shape[3]


def cache_dtype(wanted: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What `--kv-cache-dtype` means for a model in `dtype`; ValueError where the device cannot do it."""
    if wanted == "auto":
        return dtype
    if (gpu := gpu_of(device)) is not None:
        if gpu.capability < FP8_CAPABILITY:
            raise ValueError(f"--kv-cache-dtype got {wanted!r} for {gpu.in_words}; want a GPU of 8.9 or more, or auto")
        if dtype == torch.float32:  # which other kernels would have to multiply
            raise ValueError(
                f"--kv-cache-dtype got {wanted!r} for a model in float32; want --dtype bfloat16 or float16, or auto"
            )
    return FP8


def make_kv_cache(
    config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device, tp_size: int,
    tables: CacheTables | None = None,
) -> KvCache:  # fmt: skip
    """Zeros: a page holds numbers before it holds keys. `tables`: if not all layers have one."""
    tables = tables or one_table(config)
    # Where layers take turns with memory, all hold as much.
    shapes = config.cache_shapes(num_pages, page_size, tp_size)[: tables.num_places]
    blocks = {shape: _zeros((count, *shape), dtype, device) for shape, count in Counter(shapes).items()}
    left = {shape: iter(block) for shape, block in blocks.items()}
    own = [next(left[shape]) for shape in shapes]
    return KvCache(tuple(own[place] for place in tables.places), tuple(blocks.values()))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":  # memory of the system is zeros until it is written, and need not be written now
        return torch.frombuffer(mmap.mmap(-1, prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


def count_pages(
    config: ModelConfig, num_bytes: int, page_size: int, dtype: torch.dtype, group: Group,
    tables: CacheTables | None = None,
) -> int:  # fmt: skip
    """Pages of which every rank can hold as many in `num_bytes`; ValueError where not even one request fits."""
    page_bytes = config.kv_bytes_per_page(page_size, dtype, group.size, tables.num_places if tables else None)
    num_pages = group.min(num_bytes // page_bytes)
    if (unused := num_bytes // page_bytes - num_pages) > num_pages // 20:
        _LOG.warning(
            "rank %d has room for %d pages, another for %d: %s stay unused here; is something else on that card?",
            *(group.rank, num_pages + unused, num_pages, size_text(unused * page_bytes)),
        )
    if num_pages < 2:  # page 0 is the padding's
        raise ValueError(
            f"{size_text(num_bytes)} is left for the KV cache, a page of {page_size} tokens takes "
            f"{size_text(page_bytes)}: want at least two pages; raise --kv-cache-memory or --gpu-memory-utilization, "
            "or lower --page-size"
        )
    return num_pages


def size_text(num_bytes: int) -> str:
    """As people read it."""
    unit, name = next((unit, name) for unit, name in _UNITS if num_bytes >= unit or unit == 1)
    return f"{num_bytes / unit:.1f} {name}" if unit > 1 else f"{num_bytes} bytes"
