"""FP8 as GPUs convert it, in Triton's interpreter, which loses carries, denormal numbers and what is too large."""

from typing import Any

import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter

from tercet.triton_kernels.checks import FP8, FP8_MOST


def convert_rightly() -> None:
    """For all kernels that are interpreted from here on in this process."""
    convert = interpreter._convert_float

    def converted(numbers: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if tl.float8e4nv not in (given, wanted):
            return convert(numbers, given, wanted, rounding)
        numbers = np.ascontiguousarray(numbers)
        x = torch.from_numpy(numbers.view(np.uint8)).view(FP8) if given == tl.float8e4nv else torch.from_numpy(numbers)
        if wanted == tl.float8e4nv:
            return x.float().clamp(-FP8_MOST, FP8_MOST).to(FP8).view(torch.uint8).numpy()
        bits = {16: torch.uint16, 32: torch.uint32}[wanted.primitive_bitwidth]
        as_wanted = {tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32}[wanted]
        return x.to(as_wanted).view(bits).numpy()

    interpreter._convert_float = converted
