"""From a model's path to a decoder on this rank's device, ready for its first step."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from tercet.model.checkpoint import open_model, read_settings
from tercet.model.config import DTYPES, ModelConfig
from tercet.model.decoder import Decoder
from tercet.model.dummy import DummyCheckpoint
from tercet.model.kv_cache import FP8_CAPABILITY, cache_dtype
from tercet.model.parallel import Group
from tercet.model.shard import ScaleGroups
from tercet.model.weights import Checkpoint, Progress, ScaledCheckpoint, load_weights, reordered_for_cpu
from tercet.triton_kernels.dispatch import INTERPRETED, gpu_of, is_hopper

_LEAST_NUMBERS = 2**23
"""Of a matrix in FP8 on a rank, on average: products with smaller ones wait for other things than weights, and kernels
for plain numbers start sooner. The products of one row in a layer of Qwen3-0.6B take 15 us with plain weights and 21 in
FP8; with matrices of this size both take the same."""


@dataclass(frozen=True)
class Opened:
    """A model of which all is known but its weights' numbers."""

    config: ModelConfig
    tensors: Checkpoint
    dtype: torch.dtype
    cache_dtype: torch.dtype
    max_model_len: int
    in_fp8: ScaleGroups
    """What stays so."""


def open_for(
    path: Path,
    device: torch.device,
    *,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    max_model_len: int | None = None,
    dummy_seed: int | None = None,
    deterministic: bool = False,
    tensor_parallel_size: int = 1,
) -> Opened:
    """Read what there is to know before weights. `dummy_seed`: random weights instead of the checkpoint's (only its
    config.json is needed). `deterministic` and the number of ranks, both as the decoder is going to have them: what
    stays in FP8 depends on them. ValueError names what is wrong with the model, or with the settings for this model."""
    tensors: Checkpoint
    if dummy_seed is None:
        config, tensors = open_model(path, device)
        torch_dtype = resolve_dtype(dtype, config, device)
    else:
        config, quantization = read_settings(path)
        torch_dtype = resolve_dtype(dtype, config, device)
        tensors = DummyCheckpoint(config, dummy_seed, torch_dtype, device, quantization)
    in_cache = cache_dtype(kv_cache_dtype, torch_dtype, device)
    length = config.resolve_max_model_len(max_model_len)
    in_fp8 = stays_in_fp8(tensors, torch_dtype, device, deterministic=deterministic, size=tensor_parallel_size)
    return Opened(config, tensors, torch_dtype, in_cache, length, in_fp8)


def load_decoder(
    opened: Opened,
    group: Group,
    *,
    deterministic: bool = False,
    max_tokens: int = 0,
    progress: Progress | None = None,
) -> Decoder:
    """Read the weights of a model that was opened for the group's device. `max_tokens`: of the longest step, if that is
    known. ValueError names what is wrong with them, or with the number of ranks."""
    config, dtype = opened.config, opened.dtype
    config.check_tensor_parallel(group.size)
    group.connect(config.hidden_size, dtype, max_tokens, 2 * config.num_layers)
    weights = load_weights(
        opened.tensors,
        config,
        rank=group.rank,
        size=group.size,
        dtype=dtype,
        device=group.device,
        in_fp8=opened.in_fp8,
        interleaved=group.device.type == "cuda",
        progress=progress,
    )
    return Decoder(config, reordered_for_cpu(weights), group, opened.max_model_len, deterministic=deterministic)


def stays_in_fp8(
    tensors: Checkpoint, dtype: torch.dtype, device: torch.device, *, deterministic: bool = False, size: int = 1
) -> ScaleGroups:
    """Which matrices do, on each of `size` ranks: all or none. What does not is expanded once, while it is read."""
    stored = tensors.scale_groups() if isinstance(tensors, ScaledCheckpoint) else {}
    groups = {name: group for name, group in stored.items() if ".experts." not in name}  # those never stay so
    gpu = gpu_of(device)
    if gpu is None:
        return groups if INTERPRETED else {}
    if gpu.capability < FP8_CAPABILITY or dtype.itemsize != 2:  # products in fp32 would expand weights at each step
        return {}
    if deterministic and not is_hopper(device):  # so would these: only Hopper's kernel sums in plain order
        return {}
    shapes = tensors.shapes()
    num_numbers = sum(math.prod(shapes[name]) for name in groups)
    return groups if num_numbers >= _LEAST_NUMBERS * size * len(groups) else {}


def resolve_dtype(wanted: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """`auto`: on a GPU the checkpoint's own type, or float32 where that is not known or not supported; on the CPU
    float32. No model gets a type that its numbers outgrow."""
    if wanted == "auto":
        own = config.dtype
        if own is torch.float16 and not config.fits_float16:
            own = torch.bfloat16
        return torch.float32 if device.type == "cpu" or own is None or own not in DTYPES.values() else own
    if wanted not in DTYPES:
        raise ValueError(f"dtype is {wanted!r}; supported: {', '.join(DTYPES)}")
    if wanted == "float16" and not config.fits_float16:
        raise ValueError(f"dtype is 'float16', which {config.family}'s hidden states outgrow; want bfloat16 or float32")
    return DTYPES[wanted]
