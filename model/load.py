"""From a model's path to a decoder on this rank's device, ready for its first step."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tercet.model.adapter_file import AdapterFile
from tercet.model.adapter_places import AdapterPlaces, Reserved, check_fits, reserved_ranks
from tercet.model.adapters import LayerAdapters, Ranks, adapters_for_cpu, load_adapters, ranks_of
from tercet.model.cache_tables import CacheTables
from tercet.model.checkpoint import open_model, read_settings
from tercet.model.config import DTYPES, ModelConfig
from tercet.model.decoder import Decoder
from tercet.model.dummy import DummyCheckpoint
from tercet.model.eagle import OpenedEagle, load_eagle, open_eagle
from tercet.model.guess_head import with_guess_head
from tercet.model.kv_cache import FP8_CAPABILITY, cache_dtype
from tercet.model.label_tokens import with_label_tokens
from tercet.model.latent_shard import OF_ALL_RANKS
from tercet.model.opened_vision import OpenedVision, open_vision
from tercet.model.other_weights import Rank, exchange_weights
from tercet.model.parallel import Group
from tercet.model.rank_weights import Weights
from tercet.model.reordered import reordered_for_cpu
from tercet.model.rounded_checkpoint import LEFT_PLAIN, RoundedCheckpoint, round_checkpoint
from tercet.model.rounded_rows import check_rounding, with_rounded_rows
from tercet.model.same_model import check_same
from tercet.model.scaled_rows import Kept
from tercet.model.states import check_for_gpu
from tercet.model.vision import load_vision
from tercet.model.weights import Checkpoint, Progress, ScaledCheckpoint, load_weights
from tercet.triton_kernels.dispatch import INTERPRETED, gpu_of
from tercet.triton_kernels.scaled_weight import E8M0

_OF_EXPERTS = re.compile(r"\.(shared_)?experts?\.")
_LEAST_NUMBERS = 2**23
"""Of a matrix on a rank that is kept as stored, on average: products with smaller ones wait for other things than
weights, and kernels for plain numbers start sooner. The products of one row in a layer of Qwen3-0.6B take 15 us with
plain weights and 21 in FP8; with matrices of this size both take the same."""
_LEAST_CAPABILITY = {4: 80, 8: FP8_CAPABILITY}
"""Of a GPU for which kernels read numbers of so many bits."""


@dataclass(frozen=True)
class Opened:
    """A model of which all is known but its weights' numbers."""

    config: ModelConfig
    tensors: Checkpoint
    dtype: torch.dtype
    cache_dtype: torch.dtype
    max_model_len: int
    kept: Kept
    """As stored: what is so."""
    adapters: tuple[AdapterFile | None, ...] = ()
    """None: a place with nothing in it."""
    ranks: Ranks | None = None
    """Of adapters, if there are any."""
    eagle: OpenedEagle | None = None
    """The checkpoint of a layer that guesses, if it has one of its own."""
    rounds_rows: bool = False
    """Products of many rows multiply those in eight bits, too, where weights are so."""
    vision: OpenedVision | None = None
    """What sees images, if there may be any and it is known."""

    @property
    def num_expanded(self) -> int:
        """Quantized matrices that become plain numbers."""
        quantized = self.tensors.quantized() if isinstance(self.tensors, ScaledCheckpoint) else set[str]()
        return len(quantized - self.kept.keys())


def open_for(
    path: Path,
    device: torch.device,
    *,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    state_dtype: str = "auto",
    quantization: str = "auto",
    activation_dtype: str = "auto",
    max_model_len: int | None = None,
    dummy_seed: int | None = None,
    tensor_parallel_size: int = 1,
    adapters: Sequence[Path | None] = (),
    reserved: Reserved | None = None,
    label_tokens: Sequence[str] = (),
    guesses: bool = False,
    eagle: Path | None = None,
    like: Path | None = None,
    sees: bool = False,
) -> Opened:
    """Read what there is to know before weights. `dummy_seed`: random weights instead of the checkpoint's (only its
    config.json is needed). On the number of ranks depends what is kept. `adapters`: folders of LoRA adapters, by place;
    `reserved`: the places, if they may come and go; `label_tokens`: by which a model classifies; `guesses`: the layer
    behind the last is wanted, which guesses tokens; `eagle`: folder of a checkpoint with one that guesses in its place;
    `like`: of which model these are other weights; `sees`: requests may have images, if the model can see.
    ValueError names what is wrong with the model, with the settings for this model, or with an adapter for it."""
    tensors: Checkpoint
    first = None if like is None else check_same(path, like, has_weights=dummy_seed is None)
    if dummy_seed is None:
        config, tensors = open_model(path, device)
        config = with_guesser(config) if guesses else config
        torch_dtype = resolve_dtype(dtype, first or config, device)
    else:
        config, stored_as = read_settings(path)
        config = with_guesser(config) if guesses else config
        torch_dtype = resolve_dtype(dtype, first or config, device)
        tensors = DummyCheckpoint(config, dummy_seed, torch_dtype, device, stored_as)
    if quantization != "auto":
        tensors = round_checkpoint(tensors, torch_dtype, device)
    guessing = None if eagle is None else open_eagle(eagle, config, torch_dtype, device, dummy_seed)
    if guessing is not None:
        config = replace(config, guesses=True, guesser=None)
    if label_tokens:
        config = with_label_tokens(config, like or path, label_tokens)
    if state_dtype != "auto":
        config = with_state_dtype(config, state_dtype)
    if config.carried is not None and device.type == "cuda":
        check_for_gpu(config.carried)
    in_cache = cache_dtype(kv_cache_dtype, torch_dtype, device)
    length = config.resolve_max_model_len(max_model_len)
    kept = kept_as_stored(tensors, torch_dtype, device, size=tensor_parallel_size)
    if activation_dtype != "auto":
        check_rounding(kept, torch_dtype, device)
    is_split = any(".linear_attn." in name for name in kept)  # what fades states is a product of its own then
    if is_split and (adapters or reserved):
        raise ValueError(
            f"--adapter: quantized models of family {config.family} take none; want plain weights, or none"
        )
    files = tuple(None if one is None else AdapterFile(one, pinned=device.type == "cuda") for one in adapters)
    given = [file for file in files if file is not None]
    ranks = ranks_of(given, config) if given else None  # what does not fit is better known before weights are read
    if reserved is not None:
        ranks = reserved_ranks(reserved, config)
        for file in given:
            check_fits(file, ranks, config)
    return Opened(
        config, tensors, torch_dtype, in_cache, length, kept, files, ranks, guessing, activation_dtype != "auto",
        open_vision(path, device, dummy_seed, wanted=sees),
    )  # fmt: skip


def with_state_dtype(config: ModelConfig, name: str) -> ModelConfig:
    """The same with states kept in this type."""
    if config.carried is None:
        raise ValueError(
            f"--state-dtype got {name}, and no layer of this model (family {config.family}) carries a state; want auto"
        )
    return replace(config, carried=replace(config.carried, state_dtype=name))


def with_guesser(config: ModelConfig) -> ModelConfig:
    """The same with its layer that guesses."""
    if config.guesser is None:
        raise ValueError(
            f"--speculative-config: method mtp wants a model with a layer behind its last that guesses, and this one "
            f"(family {config.family}) has none; want method ngram, or none"
        )
    return replace(config, guesses=True)


def load_decoder(
    opened: Opened,
    group: Group,
    *,
    deterministic: bool = False,
    guesses: bool = False,
    max_tokens: int = 0,
    tables: CacheTables | None = None,
    progress: Progress | None = None,
) -> Decoder:
    """Read the weights of a model that was opened for the group's device. `guesses`, `tables`: see `Decoder`;
    `max_tokens`: of the longest step, if that is known. ValueError names what is wrong with them, or with the number of
    ranks."""
    config, dtype = opened.config, opened.dtype
    config.check_tensor_parallel(group.size)
    group.connect(config.hidden_size, dtype, max_tokens, 2 * config.num_layers)
    on_rank: dict[str, Any] = {
        "rank": group.rank, "size": group.size, "dtype": dtype, "device": group.device,
        "interleaved": group.device.type == "cuda",
    }  # fmt: skip
    weights = load_weights(opened.tensors, config, kept=opened.kept, progress=progress, **on_rank)
    if opened.eagle is not None:
        weights = replace(weights, guesser=load_eagle(opened.eagle, **on_rank))
    weights = _finished(weights, opened)
    adapters: tuple[LayerAdapters, ...] = ()
    if opened.ranks is not None:
        adapters = adapters_for_cpu(load_adapters(opened.adapters, opened.ranks, config, **on_rank))
    vision = None
    if opened.vision is not None:
        seen = opened.vision
        vision = load_vision(
            seen.files, config, seen.config, dtype, group.device, seen.seed, deterministic=deterministic
        )
    return Decoder(
        config, weights, group, opened.max_model_len, deterministic=deterministic, guesses=guesses, adapters=adapters,
        vision=vision, tables=tables,
    )  # fmt: skip


def _finished(weights: Weights, opened: Opened) -> Weights:
    """What is made of weights once they are read. On the CPU it uses up what it is given."""
    weights = with_guess_head(weights)
    if opened.rounds_rows:
        weights = with_rounded_rows(weights)
    return reordered_for_cpu(weights)


def load_into(decoder: Decoder, opened: Opened) -> None:
    """Read weights into the tensors of a decoder with others of the same model, between two of its steps. ValueError as
    of `exchange_weights`: it is no good for anything then, unless nothing was read."""
    if replace(opened.config, dtype=None) != replace(decoder.config, dtype=None):  # of a head, files decide, too
        raise ValueError(f"{opened.tensors.source}: its files have a head, or none, otherwise than the model's first")
    group = decoder.group
    if decoder.vision is not None:
        assert opened.vision is not None
        assert opened.vision.files is not None
        decoder.vision.read(opened.vision.files)
    rank = Rank(group.rank, group.size, decoder.dtype, group.device, opened.kept)
    exchange_weights(decoder.weights, opened.tensors, opened.config, rank, lambda weights: _finished(weights, opened))


def places_of(opened: Opened, decoder: Decoder) -> AdapterPlaces | None:
    """Where its adapters are, if it has some."""
    if opened.ranks is None:
        return None
    group, on_gpu = decoder.group, decoder.group.device.type == "cuda"
    return AdapterPlaces(
        decoder.adapters, opened.ranks, opened.config, group.rank, group.size, opened.dtype, on_gpu
    )  # fmt: skip


def kept_as_stored(tensors: Checkpoint, dtype: torch.dtype, device: torch.device, *, size: int = 1) -> Kept:
    """Which matrices are, on each of `size` ranks: all that kernels can read, or only those of experts, or none. What
    is not is expanded once, while it is read. Scales of four bits have to be of `dtype` or in fp16; MXFP4 is
    read for bf16."""
    gpu = gpu_of(device)
    if not isinstance(tensors, ScaledCheckpoint) or (gpu is None and not INTERPRETED):
        return {}
    fitting = (dtype, torch.float16) if dtype.itemsize == 2 else ()
    if dtype is torch.bfloat16:
        fitting = (*fitting, E8M0)
    kept = {
        name: way
        for name, way in tensors.stored_as().items()
        if (way.bits == 8 or way.scales in fitting) and not name.endswith(LEFT_PLAIN)
    }
    if gpu is None:
        return kept
    if dtype.itemsize != 2:  # products in fp32 would expand weights at each step
        return {}
    kept = {name: way for name, way in kept.items() if gpu.capability >= _LEAST_CAPABILITY[way.bits]}
    if isinstance(tensors, RoundedCheckpoint):  # somebody wants it
        return kept
    shapes, experts = tensors.shapes(), {name for name in kept if _OF_EXPERTS.search(name)}  # small ones, but many
    parts = {name: 1 if name.endswith(OF_ALL_RANKS) else size for name in kept.keys() - experts}
    pays = sum(math.prod(shapes[name]) / ranks for name, ranks in parts.items()) >= _LEAST_NUMBERS * len(parts)
    return kept if pays else {name: way for name, way in kept.items() if name in experts}


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
