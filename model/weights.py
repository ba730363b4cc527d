"""The reading of a rank's weights, whose places `shard.py` knows.

Where tensors come from is a `Checkpoint` (`safetensors_files.py`, `gguf_file.py`, or random numbers from `dummy.py`).
Only this rank's slices are read, each straight to its place.

Shape suffixes as in `rank_weights.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from tercet.model.config import ModelConfig
from tercet.model.places import Move
from tercet.model.rank_weights import (
    Weights,
)
from tercet.model.safetensors_files import shown
from tercet.model.scaled_rows import Kept, ScaledRows
from tercet.model.shard import LAYERS, LM_HEAD, ShardBuilder
from tercet.triton_kernels.scaled_weight import (
    MX_MOST,
    ScaledWeight,
    packed,
    packed_mx,
    stored,
    with_powers,
    with_zeros,
)

Progress = Callable[[int, int], None]
"""Called with bytes read and bytes to read, of this rank."""

_READERS = 4
"""Threads that read at a time: page faults, dequantizing and copies to the device overlap."""


class Checkpoint(Protocol):
    """Named tensors, wherever they lie."""

    @property
    def source(self) -> str:
        """What messages call it."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor it holds."""
        ...

    def read(self, name: str, dim: int, start: int, stop: int) -> Iterator[Tensor]:
        """Slice `start:stop` of dimension `dim`, in the checkpoint's own type, on any device: some rows at a time.

        What comes is good until the thread reads on.
        """
        ...


class Files(Checkpoint, Protocol):
    """Tensors as they are stored."""

    def dtype_of(self, name: str) -> torch.dtype | None: ...


def misfit(files: Files, name: str, wanted: str) -> ValueError:
    """That a tensor, which there is, is not as it has to be."""
    kind = str(files.dtype_of(name)).removeprefix("torch.")
    return ValueError(f"{files.source}: tensor {shown(name)} is {kind} {list(files.shapes()[name])}; want {wanted}")


@runtime_checkable
class ScaledCheckpoint(Checkpoint, Protocol):
    """One of which matrices may be kept as they are stored."""

    def quantized(self) -> Set[str]:
        """Matrices that are not stored as plain numbers."""
        ...

    def stored_as(self) -> Kept:
        """All that may be."""
        ...

    def read_scaled(self, name: str, dim: int, start: int, stop: int) -> Iterator[ScaledRows]:
        """As `read`, of one of these. No group is cut."""
        ...


def empty_weights(
    config: ModelConfig, *, rank: int, size: int, dtype: torch.dtype, device: torch.device, kept: Kept,
    interleaved: bool,
) -> Weights:  # fmt: skip
    """This rank's weights as `load_weights` allocates them."""
    config.check_tensor_parallel(size)
    builder = ShardBuilder(config, rank, size, dtype, device, kept)
    return builder.weights(interleaved and config.gates_in_product, config.tie_word_embeddings)


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    rank: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    kept: Kept | None = None,
    interleaved: bool = False,
    progress: Progress | None = None,
) -> Weights:
    """Allocate this rank's weights and fill them. ValueError names tensors that are missing, surplus or misshapen.

    `kept`: what is kept as it is stored, of a `ScaledCheckpoint`; all else is read as plain numbers.
    `interleaved`: gate and up rows in turns, as the fused SiLU product wants them, if the model's gate is of that kind.
    """
    interleaved = interleaved and config.gates_in_product
    config.check_tensor_parallel(size)
    tied = check_tensors(checkpoint, config)  # before there is memory for any: sizes may be beyond it
    builder = ShardBuilder(config, rank, size, dtype, device, kept or {})
    weights = builder.weights(interleaved, tied)
    carry_out(builder.moves, checkpoint, progress)
    if config.tie_word_embeddings and not tied and torch.equal(weights.embedding_VD, weights.lm_head_VD):
        return replace(weights, lm_head_VD=weights.embedding_VD)
    return weights


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Whether embedding and output are one tensor. ValueError names those that are missing, surplus or misshapen."""
    shapes = checkpoint.shapes()
    # Some files hold both although config.json ties them: as in transformers, they count as tied only when equal.
    tied = config.tie_word_embeddings and LM_HEAD not in shapes
    expected = expected_shapes(replace(config, tie_word_embeddings=tied))
    found = {name: shape for name, shape in shapes.items() if name in expected or not _is_left(name, config)}
    check_names(checkpoint.source, expected, found)
    return tied


def carry_out(moves: Sequence[Move], checkpoint: Checkpoint, progress: Progress | None = None) -> None:
    """Several side by side."""
    total = sum(move.into.nbytes for move in moves)
    done = 0
    if progress is not None:
        progress(done, total)

    def carry(move: Move) -> int:
        if move.start < move.stop:  # the last rank may have nothing but padding
            fill(move, checkpoint)
        return move.into.nbytes

    with ThreadPoolExecutor(_READERS) as readers:
        for num_bytes in readers.map(carry, moves):
            done += num_bytes
            if progress is not None:
                progress(done, total)


def fill(move: Move, checkpoint: Checkpoint) -> None:
    """Carry a move out."""
    what, row, into = (move.name, move.dim, move.start, move.stop), 0, move.into
    if isinstance(into, ScaledWeight):
        assert isinstance(checkpoint, ScaledCheckpoint)  # nothing of others is kept
        for some in checkpoint.read_scaled(*what):
            count, (numbers_RJ, scales_GR) = len(some.numbers_RI), _as_kept(move.name, some, into)
            rows = move.rows(row, count)
            into.numbers_NJ.view(torch.uint8)[rows] = numbers_RJ.to(into.numbers_NJ).view(torch.uint8)
            into.scales_GN[:, rows] = scales_GR.to(into.scales_GN)
            row += count
    else:
        for piece in checkpoint.read(*what):
            # To the device first, then to the type: the device converts faster.
            numbers = move.changed(piece.to(into.device)).view(len(piece), *into.shape[1:])
            rows = move.rows(row, len(piece))
            into[rows] = numbers if isinstance(rows, slice) else numbers.to(into)
            row += len(piece)
    assert row == len(into)


def _as_kept(name: str, some: ScaledRows, into: ScaledWeight) -> tuple[Tensor, Tensor]:
    """Some rows' numbers and scales; of MXFP4 whole blocks are filled up with zeros."""
    numbers_RI, scales_RG, zeros_RG = some
    if into.is_mx:
        exponents_RG = scales_RG.view(torch.uint8)
        if (most := int(exponents_RG.max())) > MX_MOST:
            raise ValueError(f"tensor {name} has a scale of 2^{most - 127}; want 2^{MX_MOST - 127} at most")
        return packed_mx(F.pad(numbers_RI, (0, into.stored_columns - numbers_RI.shape[1]))), with_powers(exponents_RG)
    if zeros_RG is None:
        return stored(numbers_RI), scales_RG.t()
    return packed(numbers_RI), with_zeros(scales_RG.t().to(into.of_scales), zeros_RG.t(), into.dtype)


_OF_KEYS_AND_VALUES = tuple(f"self_attn.{name}." for name in ("k_proj", "v_proj", "k_norm"))


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this model holds."""
    builder = ShardBuilder(config, 0, 1, torch.float32, torch.device("meta"), {})
    builder.weights(interleaved=False, tied=config.tie_word_embeddings)
    return {move.name: move.shape for move in builder.moves}


def _is_left(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is of a layer behind the last, or makes keys and values of a layer that borrows them: nothing
    needs those that are not expected."""
    if name.startswith(("mtp.", "model.mtp_")):  # as Qwen's files and ERNIE's have them, whatever config.json says
        return True
    layer, _, rest = name.removeprefix(LAYERS).partition(".")
    if not layer.isdigit():
        return False
    if int(layer) < config.num_layers:
        return config.layer_heads[int(layer)].borrowed and rest.startswith(_OF_KEYS_AND_VALUES)
    return int(layer) - config.num_layers < config.guessing_layers


def check_names(source: str, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """ValueError names tensors that are missing, surplus or misshapen."""
    problems = []
    if missing := [name for name in expected if name not in found]:
        problems.append(f"missing: {_some(missing)}")
    # Old Llama files carry the rotary frequencies, which follow from config.json.
    surplus = [name for name in found if name not in expected and not name.endswith("rotary_emb.inv_freq")]
    if surplus:
        problems.append(f"not part of this model: {_some(surplus)}")
    wrong = [
        f"{n} {list(found[n])} (want {list(shape)})" for n, shape in expected.items() if found.get(n, shape) != shape
    ]
    if wrong:
        problems.append(f"of the wrong shape: {_some(wrong)}")
    if problems:
        raise ValueError(f"{source}: tensors {'; tensors '.join(problems)}")


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(shown, names[:limit])) + more
