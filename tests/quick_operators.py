"""What kernels do most, in Triton's interpreter, without finding out each time what comes of it.

Which type and shape an operator's result has follows from those of its tensors. Triton is asked once for each such
case, and what is remembered of its answer must give the same numbers there; from then on NumPy works alone, which knows
how to make shapes alike. What is not known to be that simple is left to Triton each time: numbers of types that NumPy
does not have, for example.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter

_ALL = slice(None)
_WHOLE = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_PLAIN = ("int1", *_WHOLE, "fp16", "fp32")
"""Types whose numbers are NumPy's. What compares makes a tensor of int1, whose handle says what has been compared."""
_new = object.__new__


def quick_versions(name: str, slow: Callable[..., Any]) -> Callable[..., Any]:
    """Of the language's function, or tensor's method, of that name; itself if there is none."""
    if name in _OPERATORS:
        return _operator(*_OPERATORS[name], slow)
    others = {"__getitem__": _getitem, "to": _to, "load": _load, "arange": _arange, "where": _where}
    return others[name](slow) if name in others else slow


def _divide(left: Any, right: Any) -> Any:
    return (left - np.fmod(left, right)) // right  # rounds to zero, as a GPU does


_OPERATORS = {
    "__add__": (np.add, False),
    "__radd__": (np.add, True),
    "__sub__": (np.subtract, False),
    "__rsub__": (np.subtract, True),
    "__mul__": (np.multiply, False),
    "__rmul__": (np.multiply, True),
    "__floordiv__": (_divide, False),
    "__mod__": (np.fmod, False),
    "__and__": (np.bitwise_and, False),
    "__or__": (np.bitwise_or, False),
    "__xor__": (np.bitwise_xor, False),
    "__lshift__": (np.left_shift, False),
    "__rshift__": (np.right_shift, False),
    "__lt__": (np.less, False),
    "__le__": (np.less_equal, False),
    "__gt__": (np.greater, False),
    "__ge__": (np.greater_equal, False),
    "__eq__": (np.equal, False),
    "__ne__": (np.not_equal, False),
}
_COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)


class _Like:
    """What a tensor is, but for its numbers."""

    def __init__(self, tensor: Any) -> None:
        self.kind, self.type, self.dtype = tensor.handle.dtype, tensor.type, tensor.dtype
        self.shape, self.numel = tensor.shape, tensor.numel

    def tensor(self, numbers: Any) -> Any:
        handle = _new(interpreter.TensorHandle)
        handle.data, handle.dtype, handle.attr = numbers, self.kind, {}
        made = _new(core.tensor)
        made.handle, made.type, made.dtype = handle, self.type, self.dtype
        made.shape, made.numel = self.shape, self.numel
        return made


def _same(numbers: Any, tensor: Any) -> bool:
    """Whether a tensor has just these."""
    wanted = tensor.handle.data
    alike = numbers.shape == wanted.shape and numbers.dtype == wanted.dtype
    return alike and np.asarray(numbers).tobytes() == np.asarray(wanted).tobytes()


def _operator(operate: Any, reflected: bool, slow: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[Any, ...], Any] = {}

    def quick(self: Any, other: Any) -> Any:
        numbers, kind = self.handle.data, type(other)
        if kind is core.constexpr:
            other, kind = other.value, type(other.value)
        given = self.dtype.name, self.handle.dtype.name, id(self.shape), numbers.dtype.char
        if kind is core.tensor:
            others = other.handle.data
            key = *given, other.dtype.name, id(other.shape), others.dtype.char
        elif kind is int or kind is float:
            others = None
            key = *given, kind, other or repr(other)  # 0.0 and -0.0 are the same key
        else:
            return slow(self, other)
        if (found := known.get(key)) is None:
            made = slow(self, other)
            compute = _computed(operate, reflected, self, other, made)
            known[key] = (compute, _Like(made)) if compute and _same(compute(numbers, others), made) else False
            return made
        if not found:
            return slow(self, other)
        compute, like = found
        return like.tensor(compute(numbers, others))

    return quick


def _computed(operate: Any, reflected: bool, left: Any, right: Any, made: Any) -> Callable[[Any, Any], Any] | None:
    """The same with NumPy alone; None where it may be another."""
    number = None if type(right) is core.tensor else right
    if left.dtype.is_ptr():
        return _moved(left, right, number) if operate is np.add and not reflected else None
    common = made.handle.dtype if operate in _COMPARISONS else made.dtype  # both were made this before
    if common.name not in _PLAIN or left.dtype.name not in _PLAIN:
        return None
    as_common = interpreter._get_np_dtype(common)
    first = None if left.dtype.name == common.name else as_common
    if number is not None:
        constant = np.array([number], as_common)
        if reflected:
            return lambda x, _: operate(constant, x if first is None else x.astype(first))
        return lambda x, _: operate(x if first is None else x.astype(first), constant)
    if right.dtype.name not in _PLAIN or reflected:
        return None
    second = None if right.dtype.name == common.name else as_common
    if first is second is None:
        return operate
    return lambda x, y: operate(x if first is None else x.astype(first), y if second is None else y.astype(second))


def _moved(pointer: Any, offset: Any, number: int | None) -> Callable[[Any, Any], Any] | None:
    """Addresses some elements further on."""
    size = np.uint64(max(1, pointer.dtype.element_ty.primitive_bitwidth // 8))
    if number is not None:
        bytes_on = np.array([number]).astype(np.uint64) * size
        return lambda at, _: at + bytes_on
    return (lambda at, by: at + by.astype(np.uint64) * size) if offset.dtype.name in _WHOLE else None


def _getitem(slow: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[Any, ...], _Like] = {}

    def quick(self: Any, slices: Any) -> Any:
        if type(slices) is not tuple or not all(one is None or one == _ALL for one in slices) or not self.shape:
            return slow(self, slices)
        key = self.dtype.name, self.handle.dtype.name, id(self.shape), *[one is None for one in slices]
        if (like := known.get(key)) is None:
            made = slow(self, slices)
            known[key] = _Like(made)
            assert _same(self.handle.data[slices], made)
            return made
        return like.tensor(self.handle.data[slices])

    return quick


def _to(slow: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[Any, ...], Any] = {}

    def quick(self: Any, dtype: Any, *how: Any, **others: Any) -> Any:
        given = self.dtype.name
        if how or others or type(dtype) is not core.dtype or given not in _PLAIN or dtype.name not in _PLAIN[1:]:
            return slow(self, dtype, *how, **others)
        if given == dtype.name:
            return self
        key = given, id(self.shape), dtype.name
        if (found := known.get(key)) is None:
            made = slow(self, dtype)
            found = _Like(made), interpreter._get_np_dtype(dtype)
            known[key] = found if given != "fp16" or dtype.name == "fp32" else False
            return made
        return found[0].tensor(self.handle.data.astype(found[1])) if found else slow(self, dtype)

    return quick


def _where(slow: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[Any, ...], Any] = {}

    def quick(condition: Any, x: Any, y: Any) -> Any:
        key = *_kind(condition), *_kind(x), *_kind(y)
        if (found := known.get(key)) is None:
            made = slow(condition, x, y)
            known[key] = _chosen(condition, x, y, made)
            return made
        if not found:
            return slow(condition, x, y)
        like, first, second = found
        return like.tensor(np.where(condition.handle.data, first(x), second(y)))

    return quick


def _kind(value: Any) -> tuple[Any, ...]:
    if type(value) is core.tensor:
        return value.dtype.name, value.handle.dtype.name, id(value.shape), value.handle.data.dtype.char
    return type(value), repr(value)


def _chosen(condition: Any, x: Any, y: Any, made: Any) -> Any:
    """What is made of both sides before one is chosen; False if that is not all."""
    if made.dtype.name not in _PLAIN or type(condition) is not core.tensor or condition.dtype.name != "int1":
        return False
    kind, ways = interpreter._get_np_dtype(made.dtype), []
    for value in (x, y):
        if type(value) is core.tensor and value.dtype.name == made.dtype.name:
            ways.append(_numbers)
        elif type(value) is core.tensor and value.dtype.name in _PLAIN:
            ways.append(lambda value: value.handle.data.astype(kind))
        elif type(value) in (int, float):
            ways.append(functools.partial(_constant, np.array([value], kind)))
        else:
            return False
    again = np.where(condition.handle.data, ways[0](x), ways[1](y))
    return (_Like(made), *ways) if _same(again, made) else False


def _numbers(tensor: Any) -> Any:
    return tensor.handle.data


def _constant(numbers: Any, _: Any) -> Any:
    return numbers


def _load(slow: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[Any, ...], Any] = {}

    def quick(pointer: Any, mask: Any = None, other: Any = None, **how: Any) -> Any:
        masked = None if mask is None else id(mask.shape) if type(mask) is core.tensor else False
        simple = other is None or (masked and type(other) in (int, float))
        if type(pointer) is not core.tensor or masked is False or not simple:
            return slow(pointer, mask, other, **how)
        key = pointer.dtype.name, id(pointer.shape), masked, repr(other), *how.items()
        if (found := known.get(key)) is None:
            made = slow(pointer, mask, other, **how)
            known[key] = _loaded(pointer, mask, other, made)
            return made
        if not found:
            return slow(pointer, mask, other, **how)
        like, everything, instead, kind = found
        at = pointer.handle.data
        used = everything if mask is None else mask.handle.data
        if used.shape != at.shape:
            used = np.broadcast_to(used, at.shape)
        return like.tensor(interpreter._interpreter.load(at, used, instead, kind))

    return quick


def _loaded(pointer: Any, mask: Any, other: Any, made: Any) -> Any:
    """What loads of this kind have in common; False if that is not all there is to them."""
    element = pointer.dtype.element_ty if pointer.dtype.is_ptr() else None
    if element is None or element.is_block() or element.name == "int1":
        return False
    shape, kind = pointer.handle.data.shape, interpreter._get_np_dtype(element)
    instead = np.zeros(shape, kind)
    if other is not None:
        semantic = interpreter.interpreter_semantic
        number = semantic.to_tensor(other)
        if pointer.shape:
            number = semantic.broadcast_impl_value(pointer, number)[1]
        instead = semantic.cast(number, element).handle.data.copy()
    everything = np.ones(shape, bool)
    instead.flags.writeable = everything.flags.writeable = False
    used = everything if mask is None else np.broadcast_to(mask.handle.data, shape)
    again = interpreter._interpreter.load(pointer.handle.data, used, instead, kind)
    return (_Like(made), everything, instead, kind) if _same(again, made) else False


def _arange(slow: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[int, int], Any] = {}

    def quick(start: Any, end: Any, **how: Any) -> Any:
        end = end.value if type(end) is core.constexpr else end
        if how or type(start) is not int or type(end) is not int:
            return slow(start, end, **how)
        if (found := known.get((start, end))) is None:
            made = slow(start, end)
            numbers = made.handle.data.copy()
            numbers.flags.writeable = False
            known[start, end] = _Like(made), numbers
            return made
        like, numbers = found
        return like.tensor(numbers)

    return quick
