"""What images cost: the first token behind one, and how many go through an engine in a second.

Each image is another, of smooth noise, and comes as a JPEG file: to decode it and to find its size are in the figures.
"""

import argparse
import io
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from engine_flags import add_engine_flags, given_flags
from shapes import SHAPES, write_shape
from tercet.engine.llm import LLM
from tercet.engine.model_files import locate
from tercet.ipc.messages import SamplingParams

_NUMBERS = 16
"""Behind each image, of some four digits each."""
_FIRST = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def add_image_flags(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", help="folder or hub id of a model that sees")
    model.add_argument("--shape", choices=sorted(name for name, shape in SHAPES.items() if "vision_config" in shape))
    parser.add_argument("--sizes", nargs="+", default=["448x448", "1024x1024"], metavar="WxH", help="of images")
    parser.add_argument("--count", type=int, default=32, help="images at once, and of first tokens in turn, of these 8")
    add_engine_flags(parser)


def run_images(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    options = given_flags(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.shape:
            options.setdefault("load_format", "dummy")
        folder = locate(arguments.model) if arguments.model else write_shape(arguments.shape, Path(scratch))
        place = _place_of_image(folder)
        with LLM(str(folder), enable_prefix_caching=False, **options) as llm:
            return [row for size in arguments.sizes for row in _measured(llm, place, size, arguments.count)]


def _measured(llm: LLM, place: str, size: str, count: int) -> list[dict[str, Any]]:
    width, height = map(int, size.split("x"))
    files = [_image(width, height, seed) for seed in range(2 * count)]
    prompts = [{"prompt": place + _words(seed), "multi_modal_data": {"image": file}} for seed, file in enumerate(files)]
    seconds, num_tokens = [], 0
    for prompt in (prompts[0], prompts[1], *prompts[: min(count, 8)]):  # the first two warm up
        begun = time.perf_counter()
        (output,) = llm.generate([prompt], _FIRST, use_tqdm=False)
        seconds.append(time.perf_counter() - begun)
        num_tokens = len(output.prompt_token_ids)
    begun = time.perf_counter()
    llm.generate(prompts[count:], _FIRST, use_tqdm=False)
    rate = count / (time.perf_counter() - begun)
    least, median = 1e3 * min(seconds[2:]), 1e3 * statistics.median(seconds[2:])
    print(
        f"{size:12} {num_tokens:6} tokens  first token {least:8.1f} ms least {median:8.1f} median  {rate:8.1f} images/s"
    )
    return [
        {"workload": size, "measure": "ms to first token", "figure": least, "median": median, "tokens": num_tokens},
        {"workload": size, "measure": "images/s", "figure": rate, "count": count},
    ]


def _place_of_image(folder: Path) -> str:
    """The text that stands for an image in a prompt."""
    from tokenizers import Tokenizer

    from tercet.engine.config import EngineConfig
    from tercet.engine.image_rules import load_image_rules

    if (rules := load_image_rules(folder, EngineConfig(model=str(folder)))) is None:
        raise ValueError(f"{folder}: this model sees nothing; want one that does")
    if rules.marks is not None:
        return rules.marks.word
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return str(tokenizer.decode([rules.token_id], skip_special_tokens=False))


def _words(seed: int) -> str:
    return "".join(f" {1000 + seed * _NUMBERS + index}" for index in range(_NUMBERS))


def _image(width: int, height: int, seed: int) -> bytes:
    import numpy as np
    from PIL import Image

    coarse = np.random.default_rng(seed).integers(0, 256, (max(height // 16, 2), max(width // 16, 2), 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()
