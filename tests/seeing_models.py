"""Tiny random checkpoints that can see, whole as from a hub, and what transformers says to prompts with images.

An image's pixels are what the model gets: nothing here resizes.
"""

import copy
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3Processor,
    InternVLProcessor,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from checkpoints import randomize, scratch, tokenizer
from families import FAMILIES, SHAPE, VOCAB_SIZE
from seeing_shapes import GEMMAS_LENGTH, LARGE, MERGE, SHAPES, TILES_LENGTH
from tercet.ipc.images import IMAGE_IDS, PlacedImage

KINDS = tuple(SHAPES)
Parts = list[list[int] | NDArray[np.uint8]]
"""Of a prompt: token ids, and images."""
_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_PIXTRALS_MARKS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_GEMMAS_MARKS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
_GEMMA_4S_MARKS = ("<|image>", "<image|>", "<|image|>")
_INTERNVLS_MARKS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_GLMS_MARKS = tuple(f"<|{mark}|>" for mark in ("begin_of_image", "end_of_image", "image", "video"))
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ 'IMAGE' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Seeing(NamedTuple):
    """One of them."""

    folder: Path
    whole: Any
    """What transformers makes of it."""
    patch: int
    tokens: tuple[int, ...]
    """What stands for a token of an image; of some, behind each row, and behind the last."""
    length: int = 0
    """Tokens along the sides of all images, where these have one size, or of tiles."""
    tiles: bool = False
    """Images are of several of them."""
    prepares: Any = Qwen2VLImageProcessorPil
    """What does so with images of any size."""

    @property
    def side(self) -> int:
        """Pixels of a token's."""
        return self.patch * MERGE

    def image(self, rows: int, columns: int, seed: int) -> NDArray[np.uint8]:
        """So many tokens high and wide, if images can be."""
        tiles = 1 + rows % 3 if self.tiles else 1
        return image_of(self.length * tiles or rows, self.length or columns, self.side, seed)

    def ids(self, height: int, width: int) -> list[int]:
        """What transformers has in the place of an image of so many pixels."""
        (token, *others), rows, columns = self.tokens, height // self.side, width // self.side
        if not others:
            return [token] * rows * columns
        between, behind = others
        return ([token] * columns + [between]) * (rows - 1) + [token] * columns + [behind]


@functools.cache
def seeing(kind: str, *, large: bool = False, seed: int = 3, language: str = "") -> Seeing:
    """Made once. `large`: with heads as GPUs want them; `language`: of another family, by its name in FAMILIES."""
    made, eyes, text = SHAPES[kind]
    if language:
        text = {**SHAPE, **FAMILIES[language][1], "model_type": FAMILIES[language][0].model_type}
    if large:
        eyes, text = {**eyes, **LARGE[kind][0]}, {**text, **LARGE[kind][1]}
    marks = {
        "gemma3": tuple(_GEMMAS_MARKS.values()),
        "gemma4": _GEMMA_4S_MARKS,
        "gemma4-told": _GEMMA_4S_MARKS,
        "internvl": tuple(_INTERNVLS_MARKS.values()),
        "mistral3": _PIXTRALS_MARKS,
    }.get(kind, _GLMS_MARKS if kind.startswith("glm") else _MARKS)
    words = copy.deepcopy(tokenizer(VOCAB_SIZE - len(marks)))  # other kinds get other marks
    words.add_special_tokens({"additional_special_tokens": list(marks)})
    mark_ids = words.convert_tokens_to_ids(list(marks))
    if kind == "gemma3":
        begin, end, image = mark_ids
        tokens, written = [image], marks[0]
        named = {"boi_token_index": begin, "eoi_token_index": end, "image_token_index": image}
        named["mm_tokens_per_image"] = GEMMAS_LENGTH**2
    elif kind.startswith("gemma4"):
        begin, end, image = mark_ids
        tokens, written = [image], marks[2]
        named = {"boi_token_id": begin, "eoi_token_id": end, "image_token_id": image}
    elif kind == "internvl":
        tokens, written = mark_ids[2:3], marks[2]
        named = {"image_token_id": mark_ids[2], "image_seq_length": TILES_LENGTH**2}
    elif kind == "mistral3":
        tokens, written, named = mark_ids, marks[0], {"image_token_index": mark_ids[0]}
    else:
        start, end, image, video = mark_ids
        tokens, written = [image], "".join(marks[place] for place in (0, 2, 1))
        ends = ("image_start", "image_end") if kind.startswith("glm") else ("vision_start", "vision_end")
        named = {f"{ends[0]}_token_id": start, f"{ends[1]}_token_id": end}
        named |= {"image_token_id": image, "video_token_id": video}
    config = made(text_config=text, vision_config=eyes, tie_word_embeddings=False, **named)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomize(whole, torch.Generator().manual_seed(seed))
    folder = scratch() / f"seeing-{kind}-{language}-{large}-{seed}"
    whole.save_pretrained(folder)
    words.chat_template = _TEMPLATE.replace("IMAGE", written)
    words.save_pretrained(folder)
    patch = eyes["patch_size"]
    settings = {"patch_size": patch, "image_mean": [0.45, 0.5, 0.55], "image_std": [0.25, 0.3, 0.35]}
    if kind == "gemma3":
        size = {"height": eyes["image_size"], "width": eyes["image_size"]}
        settings |= {"image_processor_type": "Gemma3ImageProcessor", "size": size}
    elif kind.startswith("gemma4"):
        own = {"pooling_kernel_size": MERGE, "max_soft_tokens": 70, "do_normalize": kind == "gemma4-told"}
        settings |= {"image_processor_type": "Gemma4ImageProcessor", **own}
    elif kind == "internvl":
        size = {"height": eyes["image_size"], "width": eyes["image_size"]}
        settings |= {"image_processor_type": "GotOcr2ImageProcessor", "size": size, "max_patches": 3}
        (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": TILES_LENGTH**2}))
    elif kind == "mistral3":
        settings |= {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 60}}
        (folder / "processor_config.json").write_text(json.dumps({"patch_size": patch, "spatial_merge_size": MERGE}))
    elif kind.startswith("glm"):
        size = {"shortest_edge": 2 * (2 * patch) ** 2, "longest_edge": 2 * 64 * (2 * patch) ** 2}
        settings |= {"image_processor_type": "Glm4vImageProcessor", "merge_size": MERGE, "size": size}
    else:
        settings |= {
            "image_processor_type": "Qwen2VLImageProcessor", "merge_size": MERGE, "temporal_patch_size": 2,
            "min_pixels": (2 * patch) ** 2, "max_pixels": 64 * (2 * patch) ** 2,
        }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    length = {"gemma3": GEMMAS_LENGTH, "internvl": TILES_LENGTH}.get(kind, 0)
    named_by = {"glm4v": Glm4vImageProcessorPil, "glm46v": Glm4vImageProcessorPil, "gemma4": Gemma4ImageProcessorPil}
    prepares = named_by.get(kind.split("-")[0], Qwen2VLImageProcessorPil)
    return Seeing(folder, whole, patch, tuple(tokens), length, kind == "internvl", prepares)


def image_of(rows: int, columns: int, side: int, seed: int) -> NDArray[np.uint8]:
    """So many tokens high and wide."""
    return np.random.default_rng(seed).integers(0, 256, (rows * side, columns * side, 3), np.uint8)


def prompt_with(model: Seeing, parts: Parts) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """Token ids, of which those of images are beyond any vocabulary, and the images."""
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, list):
            ids += part
            continue
        height, width, _ = part.shape
        told = model.ids(height, width)
        images.append(PlacedImage(len(ids), len(told), height, width, part.tobytes()))
        rng = np.random.default_rng(list(part.tobytes()[:64]))
        own = rng.integers(IMAGE_IDS, 2**31, len(told)).tolist()
        ids += [new if token_id == model.tokens[0] else token_id for token_id, new in zip(told, own, strict=True)]
    return ids, tuple(images)


def reference_answer(model: Seeing, parts: Parts, num_tokens: int) -> list[int]:
    """What transformers says, greedily."""
    ids: list[int] = []
    for part in parts:
        ids += part if isinstance(part, list) else model.ids(*part.shape[:2])
    images = [Image.fromarray(part) for part in parts if not isinstance(part, list)]
    return _generated(model, ids, looked_at(model, images, do_resize=False), num_tokens)


def reference_chat(
    model: Seeing, messages: list[dict[str, Any]], images: list[Image.Image], num_tokens: int
) -> list[int]:
    """The same of a conversation, whose images have any size."""
    words = AutoTokenizer.from_pretrained(model.folder)
    text = words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if model.length and images:
        for name, mark in (_INTERNVLS_MARKS if model.tiles else _GEMMAS_MARKS).items():
            setattr(words, name, mark)
            setattr(words, f"{name}_id", words.convert_tokens_to_ids(mark))
        of_pixels = GotOcr2ImageProcessorPil if model.tiles else Gemma3ImageProcessorPil
        of_prompts = _WithoutFilms if model.tiles else Gemma3Processor
        prepare = of_prompts(of_pixels.from_pretrained(model.folder), words, image_seq_length=model.length**2)
        made = dict(prepare(images, text, add_special_tokens=False, return_tensors="pt"))
        (ids,) = made.pop("input_ids").tolist()
        return _generated(model, ids, {"pixel_values": made["pixel_values"]}, num_tokens)
    if model.prepares is Gemma4ImageProcessorPil:
        begin, end, image = _GEMMA_4S_MARKS
        text = text.replace(image, f"{begin}{image}{end}")
    seen = looked_at(model, images)
    if "image_position_ids" in seen:
        last = [places.amax(0).flip(0) + 1 for places in seen["image_position_ids"]]
        sizes = [(rows * model.patch, columns * model.patch) for rows, columns in torch.stack(last).tolist()]
    elif "image_grid_thw" in seen:
        sizes = [(rows * model.patch, columns * model.patch) for _, rows, columns in seen["image_grid_thw"].tolist()]
    else:
        sizes = [(height, width) for height, width in seen["image_sizes"].tolist()] if images else []
    left, ids = iter(sizes), []
    for token_id in words(text, add_special_tokens=False).input_ids:
        ids += model.ids(*next(left)) if token_id == model.tokens[0] else [token_id]
    assert next(left, None) is None
    return _generated(model, ids, seen, num_tokens)


class _WithoutFilms(InternVLProcessor):
    """What prepares films needs what prepares nothing here."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        wanted = argument_name != "video_processor"
        return super().check_argument_for_proper_class(argument_name, argument) if wanted else None


def looked_at(model: Seeing, images: list[Image.Image], **how: Any) -> dict[str, Any]:
    """As transformers' models are given them."""
    if not images:
        return {}
    if model.tiles:
        tiles = [tile for image in images for tile in np.asarray(image).reshape(-1, image.width, image.width, 3)]
        made = GotOcr2ImageProcessorPil.from_pretrained(model.folder)(tiles, return_tensors="pt", **how)
        return {"pixel_values": made["pixel_values"]}
    if model.length:
        made = Gemma3ImageProcessorPil.from_pretrained(model.folder)(images, return_tensors="pt", **how)
        return {"pixel_values": made["pixel_values"]}
    if model.prepares is Gemma4ImageProcessorPil:
        made = Gemma4ImageProcessorPil.from_pretrained(model.folder)(images, return_tensors="pt", **how)
        return {name: made[name] for name in ("pixel_values", "image_position_ids")}
    if len(model.tokens) == 1:
        return dict(model.prepares.from_pretrained(model.folder)(images, return_tensors="pt", **how))
    side = {"height": model.side, "width": model.side}  # as its processor asks it to
    processor = PixtralImageProcessorPil.from_pretrained(model.folder, patch_size=side)
    return dict(processor(images, return_tensors="pt", **how))


def _generated(model: Seeing, ids: list[int], seen: dict[str, Any], num_tokens: int) -> list[int]:
    ids_1T = torch.tensor([ids])
    if len(model.tokens) == 1:
        kinds = "token_type_ids" if model.length else "mm_token_type_ids"
        seen = seen if model.tiles else {**seen, kinds: (ids_1T == model.tokens[0]).int()}
    settings = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        out = model.whole.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), **seen, **settings)
    answer: list[int] = out[0, len(ids) :].tolist()
    return answer
