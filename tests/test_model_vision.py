"""Vision encoders say what transformers' say of the same picture; what does not fit is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from interpreted import rerun_interpreted
from tercet.model.safetensors_files import SafetensorsCheckpoint
from tercet.model.vision import Seen, Vision, load_vision
from tercet.model.vision_config import VisionConfig
from tercet.model.vision_reader import read_vision_config
from tercet.triton_kernels.dispatch import INTERPRETED
from vision_towers import KINDS, OUT, Tower, make_tower, picture, save_tensors

CPU = torch.device("cpu")
SIZES = [(6, 4)] if INTERPRETED else [(6, 4), (10, 14), (2, 2)]
"""In patches, where images may have any."""
TRIED = (
    ["qwen2_5_vl", "qwen3_vl", "mistral3", "gemma3", "internvl-large", "glm4v", "gemma4-clipped"]
    if INTERPRETED
    else list(KINDS)
)


def config_of(folder: Path, raw: dict[str, Any]) -> VisionConfig:
    config = read_vision_config(folder, raw)
    assert config is not None
    return config


def load(tower: Tower, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Vision:
    config: Any = SimpleNamespace(hidden_size=OUT)
    files = SafetensorsCheckpoint(tower.folder)
    return load_vision(files, config, config_of(tower.folder, tower.raw), dtype, device)


def sizes_of(config: VisionConfig, sizes: list[tuple[int, int]] = SIZES) -> list[tuple[int, int]]:
    side = config.length * config.merge
    if config.tiles:
        return [(side * count, side) for count in range(1, len(sizes) + 1)]
    return [(side, side)] if side else sizes


def without_breaks(seen: Seen, size: tuple[int, int], config: VisionConfig) -> Seen:
    """Rows of tokens alone, of an image of so many patches."""
    if not config.breaks:
        return seen
    rows_NO = seen.rows_NO.view(size[0] // config.merge, size[1] // config.merge + 1, -1)
    assert not rows_NO[:, -1].any()
    return seen._replace(rows_NO=rows_NO[:, :-1].flatten(0, 1))


def check_seen(got: Seen, wanted: list[Tensor]) -> None:
    assert len(wanted) == 1 + len(got.deep)
    for ours, theirs in zip((got.rows_NO, *got.deep), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


@pytest.fixture(scope="module", params=TRIED)
def tower(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tower:
    return make_tower(tmp_path_factory.mktemp(request.param), request.param)


def test_rows_are_those_of_transformers(tower: Tower) -> None:
    vision = load(tower)
    config = vision.config
    for size in sizes_of(config):
        pixels = picture(*size, config.patch)
        seen = without_breaks(vision.encode(pixels), size, config)
        check_seen(seen, tower.seen(pixels, config.mean, config.deviation))
        assert len(seen.rows_NO) == size[0] * size[1] // config.merge**2


def test_the_other_names(tmp_path: Path) -> None:
    """And settings for pixels, and heads whose numbers are no power of two."""
    tower = make_tower(tmp_path, "qwen2_5_vl", base="", hidden_size=72)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 1, 2.0]}')
    pixels = picture(4, 8, 6)
    check_seen(load(tower).encode(pixels), tower.seen(pixels, (0.1, 0.2, 0.3), (0.5, 1.0, 2.0)))


def test_a_projector_with_biases_and_larger_tokens(tmp_path: Path) -> None:
    tower = make_tower(
        tmp_path, "mistral3", base="", hidden_size=24, spatial_merge_size=3, multimodal_projector_bias=True
    )
    vision, pixels = load(tower), picture(6, 9, 6)
    config = vision.config
    seen = without_breaks(vision.encode(pixels), (6, 9), config)
    check_seen(seen, tower.seen(pixels, config.mean, config.deviation))


def test_larger_tokens_of_one_frame(tmp_path: Path) -> None:
    sizes = {"hidden_size": 24, "spatial_merge_size": 3, "temporal_patch_size": 1, "attention_bias": True}
    tower = make_tower(tmp_path, "glm4v", **sizes)
    vision, pixels = load(tower), picture(6, 9, 6)
    check_seen(vision.encode(pixels), tower.seen(pixels, vision.config.mean, vision.config.deviation))


@pytest.mark.skipif(INTERPRETED, reason="reads files")
class TestFiles:
    """What is in them, and what is not."""

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"blocks.2.norm2.bias": None}, r"missing: visual\.blocks\.2\.norm2\.bias$"),
            ({"blocks.4.norm2.bias": torch.zeros(48)}, r"not part of this model: visual\.blocks\.4\.norm2\.bias$"),
            ({"pos_embed.weight": torch.zeros(25, 40)}, r"pos_embed\.weight \[25, 40\] \(want \[25, 48\]\)"),
            ({"pos_embed.weight": torch.zeros(25, 48).char()}, r"pos_embed\.weight is int8 .*; want plain numbers"),
        ],
        ids=["missing", "surplus", "misshapen", "no numbers"],
    )
    def test_tensors_that_do_not_fit(self, tmp_path: Path, change: dict[str, Tensor | None], message: str) -> None:
        tower = make_tower(tmp_path, "qwen3_5", base="")
        tensors: dict[str, Any] = {**load_file(tmp_path / "model.safetensors")}
        tensors.update({f"visual.{name}": tensor for name, tensor in change.items()})
        save_tensors(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None})
        with pytest.raises(ValueError, match=message):
            load(tower)

    @pytest.mark.parametrize("kind", ["qwen3_vl", "internvl", "glm4v"])
    def test_other_weights_are_read_into_the_same_places(self, tmp_path: Path, kind: str) -> None:
        first, second = (make_tower(tmp_path / str(seed), kind, seed=seed) for seed in (1, 2))
        vision = load(first)
        pixels = picture(*sizes_of(vision.config)[0], vision.config.patch)
        addresses = [move.into.data_ptr() for move in vision._moves]
        vision.encode(pixels)
        vision.read(SafetensorsCheckpoint(second.folder))
        assert addresses == [move.into.data_ptr() for move in vision._moves]
        for ours, wanted in zip(vision.encode(pixels), load(second).encode(pixels), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=0, atol=0)

    def test_random_weights(self, tower: Tower) -> None:
        config: Any = SimpleNamespace(hidden_size=OUT)
        vision = config_of(tower.folder, tower.raw)
        pixels = picture(*sizes_of(vision)[0], vision.patch)
        parts = [load_vision(None, config, vision, torch.float32, CPU, seed).encode(pixels) for seed in (3, 3, 4)]
        assert torch.equal(parts[0].rows_NO, parts[1].rows_NO)
        assert not torch.equal(parts[0].rows_NO, parts[2].rows_NO)

    def test_warm_up(self, tower: Tower) -> None:
        load(tower).warm_up(40)

    def test_another_hidden_size(self, tower: Tower) -> None:
        config: Any = SimpleNamespace(hidden_size=64)
        with pytest.raises(ValueError, match="rows of 40 numbers; want the language model's hidden_size, 64"):
            load_vision(None, config, config_of(tower.folder, tower.raw), torch.float32, CPU, 1)

    def test_sides_that_are_no_tokens(self, tower: Tower) -> None:
        vision = load(tower)
        with pytest.raises(ValueError, match=f"wanted sides that are multiples of {vision.config.side}"):
            vision.encode(torch.zeros(vision.config.side, vision.config.patch, 3, dtype=torch.uint8))

    def test_another_size_than_the_only_one(self, tmp_path: Path) -> None:
        vision = load(make_tower(tmp_path, "gemma3"))
        with pytest.raises(ValueError, match="got an image of 36 x 18, wanted 36 x 36"):
            vision.encode(torch.zeros(36, 18, 3, dtype=torch.uint8))
        with pytest.raises(ValueError, match="got an image of 18 x 18, wanted 36 x 36"):
            vision.encode(torch.zeros(18, 18, 3, dtype=torch.uint8))

    def test_what_is_no_tiles(self, tmp_path: Path) -> None:
        vision = load(make_tower(tmp_path, "internvl"))
        for rows, columns in ((24, 48), (36, 24)):
            with pytest.raises(ValueError, match=f"image of {rows} x {columns}, wanted a multiple of 24 x 24"):
                vision.encode(torch.zeros(rows, columns, 3, dtype=torch.uint8))

    def test_a_tile_has_nothing_of_others(self, tmp_path: Path) -> None:
        vision = load(make_tower(tmp_path, "internvl"))
        pixels = picture(12, 4, 6)
        alone = [vision.encode(tile).rows_NO for tile in pixels.split(24)]
        torch.testing.assert_close(vision.encode(pixels).rows_NO, torch.cat(alone))

    @pytest.mark.parametrize("base", ["", "model."])
    @pytest.mark.parametrize("inside", ["", "vision_model."])
    def test_all_names_of_a_tower(self, tmp_path: Path, base: str, inside: str) -> None:
        """As versions of transformers write them, and hubs have them."""
        tower = make_tower(tmp_path, "gemma3", base=base)
        tensors = load_file(tmp_path / "model.safetensors")
        own = {name.replace("vision_tower.", f"vision_tower.{inside}"): tensor for name, tensor in tensors.items()}
        save_tensors(tmp_path, own)
        vision, pixels = load(tower), picture(6, 6, 6)
        check_seen(vision.encode(pixels), tower.seen(pixels, vision.config.mean, vision.config.deviation))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "hidden"),
    [
        ("qwen2_5_vl", 16 * 80),
        ("qwen3_vl", 16 * 72),
        ("mistral3", 16 * 64),
        ("gemma3", 16 * 72),
        ("gemma4", 16 * 72),
        ("internvl", 16 * 64),
        ("internvl-large", 16 * 128),
        ("glm4v", 16 * 128),
    ],
)
def test_on_a_gpu(kind: str, hidden: int, tmp_path: Path) -> None:
    """In bf16, with real heads and windows: as near to fp32 as rounding allows, and the same bits each time."""
    named = kind in ("mistral3", "gemma3") or kind.startswith("internvl")
    own = {"num_attention_heads": 16} if named else {"num_heads": 16, "window_size": 112}
    if kind.startswith("internvl"):
        own |= {"image_size": 448, "image_seq_length": 256}
    if kind == "glm4v":
        own = {"num_heads": 16, "image_size": 336, "out_hidden_size": OUT}
    if kind == "gemma4":
        own = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72}
    if kind == "gemma3":
        own |= {"image_size": 896, "mm_tokens_per_image": 256}
    tower = make_tower(tmp_path, kind, hidden_size=hidden, intermediate_size=3420, patch_size=14, **own)
    exact, rounded = load(tower), load(tower, torch.device("cuda"), torch.bfloat16)
    rounded.warm_up(64)
    for size in sizes_of(exact.config, [(40, 26), (2, 2), (6, 34)]):
        pixels = picture(*size, 14)
        wanted, got = exact.encode(pixels), rounded.encode(pixels.cuda())
        again = rounded.encode(pixels.cuda())
        for ours, theirs, same in zip(
            (got.rows_NO, *got.deep), (wanted.rows_NO, *wanted.deep), (again.rows_NO, *again.deep), strict=True
        ):
            assert torch.equal(ours, same)
            assert float((ours.cpu().float() - theirs).norm() / theirs.norm()) < 0.03


def test_interpreted() -> None:
    rerun_interpreted(__file__)
