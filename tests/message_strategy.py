"""Any value of any message, by the types of its fields."""

from typing import Any, get_args

import hypothesis.strategies as st
import msgspec


def of_type(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a message's field type."""
    arguments = get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return struct_of(kind)
    if kind is int:
        return st.integers(-(2**63), 2**63 - 1)
    if kind is float:
        return st.floats(allow_nan=False, allow_infinity=False)  # JSON has neither
    if kind in (str, bytes, bool):
        return st.from_type(kind)
    if kind is type(None):
        return st.none()
    if kind is Any:
        return st.booleans() | st.integers(-5, 5) | st.lists(st.text(max_size=3), max_size=2)
    origin = getattr(kind, "__origin__", None)
    if origin is tuple:
        return st.lists(of_type(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(of_type(arguments[0]), of_type(arguments[1]), max_size=3)
    if str(kind).startswith("typing.Literal"):
        return st.sampled_from(arguments)
    assert arguments, kind
    return st.one_of([of_type(argument) for argument in arguments])


def struct_of(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{field.name: of_type(field.type) for field in msgspec.structs.fields(kind)})
