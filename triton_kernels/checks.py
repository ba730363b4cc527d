"""What every wrapper asks of its tensors before a launch, with messages that name what came and what is wanted.

Knows shapes, types and strides; knows no kernel.
"""

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn
"""What a KV cache may hold in place of the model's own type; what is larger than its largest number becomes that."""
FP8_MOST = 448.0


def check_shape(name: str, tensor: Tensor, *shape: int | None) -> None:
    """The shape, number by number; None stands for any size."""
    if tensor.shape == shape:  # nearly always, and this is asked some hundred thousand times in a start
        return
    if tensor.ndim != len(shape) or any(want not in (None, got) for want, got in zip(shape, tensor.shape, strict=True)):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, wanted [{wanted}]")


def check_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: got {tensor.dtype}, wanted {' or '.join(map(str, dtypes))}")


def check_device(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, wanted {like.device}")


def check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name}: got strides {list(tensor.stride())} for shape {list(tensor.shape)}, wanted contiguous"
        )


def check_indices(name: str, tensor: Tensor, like: Tensor, *shape: int | None) -> None:
    """int32, contiguous, of this shape, and on the device of `like`."""
    check_shape(name, tensor, *shape)
    check_dtype(name, tensor, torch.int32)
    check_contiguous(name, tensor)
    check_device(name, tensor, like)


def check_of_heads(name: str, numbers_H: Tensor, num_heads: int, like: Tensor) -> None:
    """A float of any type for each head, contiguous, and on the device of `like`."""
    check_shape(name, numbers_H, num_heads)
    check_dtype(name, numbers_H, *FLOATS)
    check_contiguous(name, numbers_H)
    check_device(name, numbers_H, like)


def check_same(name: str, tensor: Tensor, like: Tensor, *others: torch.dtype) -> None:
    """Contiguous, and of the type, or one of `others`, and the device of `like`."""
    if tensor.dtype != like.dtype or tensor.device != like.device or not tensor.is_contiguous():
        check_dtype(name, tensor, like.dtype, *others)
        check_device(name, tensor, like)
        check_contiguous(name, tensor)
