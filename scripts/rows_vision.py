"""Rows of the kernel bench for encoders of images: attention, what is between products, and whole encoders."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from kernel_rows import Row
from kernel_timing import Stopwatch
from shapes_vision import gemma3, glm4v, internvl
from tercet.model.vision import Vision, load_vision
from tercet.model.vision_config import VisionConfig
from tercet.model.vision_reader import read_vision_config
from tercet.triton_kernels.full_attention import full_attention
from tercet.triton_kernels.gelu import gelu
from tercet.triton_kernels.layer_norm import add_layer_norm
from tercet.triton_kernels.turn_rows import turn_rows

_HEADS = 16
_SIDES = 256, 512, 1024, 2048
"""Of square images, nearly."""


def rows(stopwatch: Stopwatch) -> Iterator[Row]:
    for dim, patches in ((72, 256), (72, 1024), (72, 4096), (72, 16384), (80, 5476), (64, 12100)):
        yield _attention(stopwatch, dim, patches, patches)
    yield _attention(stopwatch, 80, 5440, 64)
    yield from _pointwise(stopwatch, 4096, 1152, 4352)
    for kind, vision in (
        ("qwen3_vl", {"out_hidden_size": 4096}),
        ("qwen2_5_vl", {"hidden_size": 1280}),
        ("qwen3_5", {}),
        ("mistral3", {"hidden_act": "silu", "patch_size": 14}),
        ("gemma3", gemma3()["vision_config"]),
        ("glm4v", glm4v()["vision_config"]),
        ("internvl", internvl({"tie_word_embeddings": False, "torch_dtype": "bfloat16"})["vision_config"]),
    ):
        eye = _eye(kind, vision)
        only = eye.config.length * eye.config.side
        for side in (only,) if only else _SIDES:
            for tiles in (1, 3, 13) if eye.config.tiles else (1,):
                yield _encoder(eye, kind, side, tiles)


def _attention(stopwatch: Stopwatch, dim: int, patches: int, window: int) -> Row:
    width = _HEADS * dim
    inputs = stopwatch.rotation(patches, 3 * width)
    ends = torch.arange(window, patches + 1, window, device="cuda", dtype=torch.int32)

    def attend(i: int) -> None:
        full_attention(inputs[i], ends, window, _HEADS, dim**-0.5)

    def peer(i: int) -> None:
        q, k, v = inputs[i].view(-1, window, 3, _HEADS, dim).permute(2, 0, 3, 1, 4)
        F.scaled_dot_product_attention(q, k, v)

    size = 4.0 * patches * width
    flops = size * window
    shape = f"P={patches} window={window} H={_HEADS} D={dim}"
    return Row("full_attention", shape, attend, len(inputs), 2 * size, flops, peer, "torch")


def _pointwise(stopwatch: Stopwatch, patches: int, hidden: int, inner: int) -> Iterator[Row]:
    updates, stream = stopwatch.rotation(patches, hidden), torch.zeros(patches, hidden, device="cuda").bfloat16()
    weight, bias, size = stopwatch.cut(5, hidden), stopwatch.cut(6, hidden), 2.0 * patches * hidden

    def norm(i: int) -> None:
        add_layer_norm(updates[i], stream, weight, bias, 1e-6)

    yield Row("add_layer_norm", f"P={patches} D={hidden}", norm, len(updates), 4 * size)
    inners = [inner_PF.clone() for inner_PF in stopwatch.rotation(patches, inner)]

    def bend(i: int) -> None:
        gelu(inners[i], "tanh")

    yield Row("gelu", f"P={patches} F={inner}", bend, len(inners), 4.0 * patches * inner)
    qkvs = [qkv_PN.clone() for qkv_PN in stopwatch.rotation(patches, 3 * hidden)]
    turns = torch.randn(patches, hidden // _HEADS, device="cuda")

    def turn(i: int) -> None:
        turn_rows(qkvs[i], turns, _HEADS)

    yield Row("turn_rows", f"P={patches} H={_HEADS} D={hidden // _HEADS}", turn, len(qkvs), 4 * size)


def _eye(kind: str, vision: dict[str, Any]) -> Vision:
    config = read_vision_config(Path(), {"model_type": kind, "vision_config": vision})
    assert config is not None
    language: Any = SimpleNamespace(hidden_size=config.out_size)
    return load_vision(None, language, config, torch.bfloat16, torch.device("cuda"))


def _encoder(eye: Vision, kind: str, side: int, tiles: int) -> Row:
    config = eye.config
    side = side // config.side * config.side
    pixels = torch.randint(0, 256, (side * tiles, side, 3), device="cuda", dtype=torch.uint8)
    eye.encode(pixels)  # how its patches lie is worked out on the host
    patches = tiles * (side // config.patch) ** 2

    def encode(i: int) -> None:
        eye.encode(pixels)

    return Row(
        f"eye of {kind}", f"{side}x{side * tiles}", encode, 1, 2.0 * _numbers(config), _flops(config, patches), nodes=2
    )


def _numbers(config: VisionConfig) -> int:
    """Of all layers' matrices."""
    each = (4 * config.hidden_size + (2 + config.gated) * config.inner_size) * config.hidden_size
    return config.num_layers * each


def _flops(config: VisionConfig, patches: int) -> float:
    windows = sum(config.has_windows(layer) for layer in range(config.num_layers))
    seen = (config.num_layers - windows) * patches + windows * (config.window * config.merge) ** 2
    return 2.0 * patches * _numbers(config) + 4.0 * patches * seen * config.hidden_size
