"""Checkpoints that see, without weights: what the tokenizer process reads of them. And pictures to show them."""

import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image
from tokenizers import AddedToken

from tokenizer_process import byte_tokenizer

PAD, IMAGE_TOKEN = "<|image_pad|>", 257
VOCAB_SIZE = 260
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% elif m.content %}"
    "{% for part in m.content %}{% if part.type == 'image' %}" + PAD + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}<assistant>"
)
"""As Qwen's, with less around it."""
BREAK, END = 258, 259
"""Behind rows of an image, or ahead of one and behind it, where a model has that."""
BREAKS = "[IMG_BREAK]", "[IMG_END]"
GEMMAS = "<start_of_image>", "<end_of_image>"
INTERNVLS = "<img>", "</img>"
PIXTRALS = {"patch_size": 14, "size": {"longest_edge": 112}}
PROCESSOR = {"patch_size": 14, "merge_size": 2, "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16}


def seeing_checkpoint(
    folder: Path, architecture: str = "Qwen2VLForConditionalGeneration", processor: dict[str, Any] = PROCESSOR
) -> Path:
    """A token for each byte, the end of sequence, then that of images."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    gemma, around = architecture.startswith("Gemma3"), {"Gemma3": GEMMAS, "InternVL": INTERNVLS, "Mistral3": BREAKS}
    pixtral, internvl = architecture.startswith("Mistral3"), architecture.startswith("InternVL")
    names = (PAD, *around.get(architecture.removesuffix("ForConditionalGeneration"), ()))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = TEMPLATE.replace(PAD, GEMMAS[0]) if gemma else TEMPLATE
    settings = {"eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))
    config = {"architectures": [architecture], "image_token_id": IMAGE_TOKEN, "eos_token_id": 256}
    if gemma:
        eye = {"patch_size": 14, "image_size": 56}
        config |= {"boi_token_index": BREAK, "eoi_token_index": END, "vision_config": eye, "mm_tokens_per_image": 4}
    if internvl:
        config |= {"vision_config": {"patch_size": 14, "image_size": 56}, "image_seq_length": 4}
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    if pixtral:
        (folder / "processor_config.json").write_bytes(b'{"patch_size": 14, "spatial_merge_size": 2}')
    (folder / "preprocessor_config.json").write_bytes(msgspec.json.encode(processor))
    return folder


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Something with edges and slopes, another for each seed."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (max(2, height // 9), max(2, width // 9), 4), np.uint8)
    image = Image.fromarray(coarse, "RGBA").resize((width, height), Image.Resampling.BICUBIC)
    if mode.startswith("I"):
        values = np.asarray(image.convert("L")).astype(np.uint16) * 257
        return Image.fromarray(values)
    return image.convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """A file of it."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
