"""What transformers makes of a picture, as far as the tokenizer process does it: its size and its pixels."""

from typing import Any

import numpy as np
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tercet.engine.image_rules import ImageRules
from tercet.engine.image_sizes import OneSize, PixelBounds, Tiles, TokenBound


def as_transformers(image: Image.Image, rules: ImageRules) -> np.ndarray[Any, Any]:
    """Height x width x 3, before the numbers are scaled."""
    plain: Any = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
    if isinstance(rules.sizes, Tiles):
        squares: Any = {"size": {"height": rules.sizes.side, "width": rules.sizes.side}, "crop_to_patches": True}
        counts: Any = {"min_patches": rules.sizes.least, "max_patches": rules.sizes.most, "resample": rules.resample}
        tiles = GotOcr2ImageProcessorPil(**squares, **counts).preprocess(image, **plain)["pixel_values"]
        tall: np.ndarray[Any, Any] = tiles.transpose(0, 2, 3, 1).reshape(-1, rules.sizes.side, 3).astype(np.uint8)
        return tall
    if isinstance(rules.sizes, TokenBound):
        patch, merge = rules.patch_size, rules.merge_size
        own: Any = {"patch_size": patch, "pooling_kernel_size": merge, "max_soft_tokens": rules.sizes.most}
        made = Gemma4ImageProcessorPil(**own).preprocess(image, **plain)
        places = made["image_position_ids"][0]
        columns, rows = places.max(0) + 1
        patches = made["pixel_values"][0][: rows * columns].reshape(rows, columns, patch, patch, 3)
        whole: np.ndarray[Any, Any] = patches.transpose(0, 2, 1, 3, 4).reshape(rows * patch, columns * patch, 3)
        return whole.astype(np.uint8)
    if not isinstance(rules.sizes, PixelBounds):
        bounds: Any = {"height": rules.sizes.height, "width": rules.sizes.width}
        side: Any = {"height": rules.factor, "width": rules.factor}  # as its processor asks for
        gemma = isinstance(rules.sizes, OneSize)
        how = Gemma3ImageProcessorPil(size=bounds) if gemma else PixtralImageProcessorPil(size=bounds, patch_size=side)
        made = how.preprocess(image, **plain)
        pixels: np.ndarray[Any, Any] = made["pixel_values"][0].transpose(1, 2, 0).astype(np.uint8)
        return pixels
    of_glm = rules.sizes.frames > 1
    size = {"shortest_edge": rules.sizes.least, "longest_edge": rules.sizes.most}
    sizes: Any = {"patch_size": rules.patch_size, "merge_size": rules.merge_size}
    made = (Glm4vImageProcessorPil if of_glm else Qwen2VLImageProcessorPil)(size=size, **sizes).preprocess(
        image, **plain
    )
    (_, rows, columns) = made["image_grid_thw"][0].tolist()
    patch, merge = rules.patch_size, rules.merge_size
    shape = rows // merge, columns // merge, merge, merge, 3, 2, patch, patch
    grid = made["pixel_values"].reshape(shape)[:, :, :, :, :, 0]
    return grid.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * patch, columns * patch, 3).astype(np.uint8)
