"""Triton's interpreter without what it does in vain: it takes a fifth of the time and says the same.

Before each kernel, and once more for each function that the kernel calls, it looks through all of the language and
replaces its functions by its own; later it puts them back. Here they are replaced once and stay: a process interprets
or compiles, never both. And whether integers overflow it finds out, to say it only where Triton debugs.

Half of what is left goes to types: each tensor has one of its own, with a name, and a shape whose every size is an
object. Here types that are the same share these, which nothing changes; and of two tensors with the same shape and type
an operator does not find out how to make them alike, nor, of a tensor and a number, makes a tensor of that each time.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
from triton import language
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from quick_operators import quick_versions

_ADDRESS = np.dtype(np.uint64)
_MOST_IN_KNOWN = 4096
"""Numbers in a tensor of one number that is kept."""


def quicken() -> None:
    """For all kernels that are interpreted from here on in this process."""
    _replace_once()
    _share_types()
    of_number = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda kind: _ADDRESS if kind.scalar.is_ptr() else of_number(kind.scalar)
    interpreter._validate_np_data_size = _fits
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )


def _replace_once() -> None:
    replace, nothing_to_put_back = interpreter._patch_lang, interpreter._LangPatchScope()
    replaced: set[tuple[bool, bool]] = set()

    @functools.cache
    def replace_once(function: Any) -> interpreter._LangPatchScope:
        modules = [value for value in function.__globals__.values() if value is language or value is language.core]
        seen = (language in modules, language.core in modules)
        if seen not in replaced:
            replace(function)
            replaced.add(seen)
        return nothing_to_put_back

    interpreter._patch_lang = replace_once
    interpreter._patch_attr = _replace_builtin


def _replace_builtin(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """What the language calls a builtin is called at once, with the interpreter's semantics."""
    checks_semantics = member.__code__ is core.arange.__code__
    function, semantics = member.__wrapped__ if checks_semantics else member, interpreter.interpreter_semantic

    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantics
        return function(*args, **kwargs)

    scope.set_attr(owner, name, quick_versions(name, called) if owner in (language, core, core.tensor) else called)


def _share_types() -> None:
    block_type, of_blocks = core.block_type.__init__, {}
    of_sizes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    equal, unwrap = core.dtype.__eq__, core._unwrap_if_constexpr
    broadcast, check = TritonSemantic.broadcast_impl_value, TritonSemantic.binary_op_type_checking_impl
    of_numbers: dict[tuple[Any, ...], Any] = {}
    alike = {id(kind) for kind in (language.float32, language.int32, language.int64)}

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if type(size) is core.constexpr else size for size in shape])
        known = of_blocks.get((element_ty.name, sizes))
        if known is None or {*map(type, sizes)} != {int}:  # 16.0 is 16 to a dictionary, and no size to a kernel
            block_type(self, element_ty, shape)
            of_blocks[element_ty.name, sizes] = self.shape, self.numel, self.name
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if (known := of_sizes.get(sizes)) is None:
            numel = core.constexpr(int(np.prod(sizes, dtype=np.int64)))
            known = of_sizes[sizes] = core.tuple([core.constexpr(size) for size in sizes]), numel
        self.shape, self.numel = known

    def broadcast_others(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        return (left, right) if left.shape is right.shape else broadcast(self, left, right)

    def check_others(self: Any, left: Any, right: Any, *how: Any, **rules: Any) -> tuple[Any, Any]:
        are_tensors = type(left) is type(right) is core.tensor
        if are_tensors:
            if left.shape is right.shape and left.dtype is right.dtype and id(left.dtype) in alike:
                return left, right  # any operator takes them as they are
            return check(self, left, right, *how, **rules)
        numbers = [one for one in (left, right) if type(one) in (int, float) and one]  # 0.0 may be -0.0
        tensor = left if type(left) is core.tensor else right
        if len(numbers) != 1 or rules or type(tensor) is not core.tensor or id(tensor.dtype) not in alike:
            return check(self, left, right, *how, **rules)
        key = type(numbers[0]), numbers[0], id(tensor.dtype), id(tensor.shape), tensor is left, how
        if (known := of_numbers.get(key)) is not None:
            return (left, known) if tensor is left else (known, right)
        alike_left, alike_right = check(self, left, right, *how)
        kept, made = (alike_left, alike_right) if tensor is left else (alike_right, alike_left)
        if kept is tensor and made.numel.value <= _MOST_IN_KNOWN:
            made.handle.data.flags.writeable = False
            of_numbers[key] = made
        return alike_left, alike_right

    core.block_type.__init__ = init_block_type
    core.tensor.__init__ = init_tensor
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    core._unwrap_if_constexpr = lambda x: x if type(x) in (core.tensor, core.dtype, int) else unwrap(x)
    TritonSemantic.broadcast_impl_value = broadcast_others
    TritonSemantic.binary_op_type_checking_impl = check_others


def _fits(array: Any, kind: Any) -> bool:
    return kind.is_ptr() or array.itemsize * 8 <= max(kind.primitive_bitwidth, 8)
