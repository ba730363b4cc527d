"""A checkpoint of plain numbers as one in FP8, which it rounds them to while they are read: `--quantization fp8`.

Each row of a layer's linear modules, experts' too, has a scale. Embeddings, heads, routers and norms stay as they are,
and so does what makes heads of latents. Knows names; where numbers go is `weights.py`'s matter.
"""

import re
from collections.abc import Iterator, Mapping, Set

import torch
from torch import Tensor

from tercet.model.kv_cache import FP8_CAPABILITY
from tercet.model.latent_shard import OF_HEADS
from tercet.model.scaled_rows import Kept, ScaledRows, StoredAs, rounded
from tercet.model.weights import Checkpoint, ScaledCheckpoint
from tercet.triton_kernels.dispatch import gpu_of

_LINEAR = re.compile(r"^(model\.layers\.|mtp\.).*(_proj|_proj_with_mqa|_proj_qkvz?|_proj_z|\.w[123])\.weight$")
LEFT_PLAIN = (OF_HEADS, "mamba.in_proj.weight", "mamba.out_proj.weight")
"""How the names end of those whose rows go to more places than one product: kept plain, however they are stored."""


class RoundedCheckpoint:
    """As the checkpoint, but for those matrices."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        """`device`: where numbers are rounded, which the weights are for."""
        self.source = checkpoint.source
        self._checkpoint = checkpoint
        self._device = device
        self._rounded = {
            name: StoredAs(8, shape[1], torch.float32)
            for name, shape in checkpoint.shapes().items()
            if len(shape) == 2 and _LINEAR.match(name) and not name.endswith(LEFT_PLAIN)
        }

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._checkpoint.shapes()

    def read(self, name: str, dim: int, start: int, stop: int) -> Iterator[Tensor]:
        if name in self._rounded:
            for piece in self.read_scaled(name, dim, start, stop):
                yield piece.expanded()
        else:
            yield from self._checkpoint.read(name, dim, start, stop)

    def quantized(self) -> Set[str]:
        return self._rounded.keys()

    def stored_as(self) -> Kept:
        return self._rounded

    def read_scaled(self, name: str, dim: int, start: int, stop: int) -> Iterator[ScaledRows]:
        """A row's scale is that of all its columns, whichever are wanted."""
        rows = (start, stop) if dim == 0 else (0, self.shapes()[name][0])
        for piece in self._checkpoint.read(name, 0, *rows):
            scaled = rounded(piece.to(self._device))
            yield scaled if dim == 0 else scaled.columns(start, stop)


def round_checkpoint(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> RoundedCheckpoint:
    """ValueError where weights are quantized already, or the GPU has nothing of it. On a CPU they are the same numbers,
    in the room of plain ones."""
    if isinstance(checkpoint, ScaledCheckpoint) and checkpoint.quantized():
        raise ValueError(f"--quantization got 'fp8', and {checkpoint.source} is quantized already; want auto")
    gpu = gpu_of(device)
    if gpu is not None and gpu.capability < FP8_CAPABILITY:
        raise ValueError(f"--quantization got 'fp8' for {gpu.in_words}; want a GPU of 8.9 or more, or auto")
    if gpu is not None and dtype.itemsize != 2:
        raise ValueError("--quantization got 'fp8' for a model in float32 on a GPU; want --dtype bfloat16 or float16")
    return RoundedCheckpoint(checkpoint, device)
