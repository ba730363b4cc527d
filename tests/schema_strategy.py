"""Values that a JSON schema allows, for hypothesis, and the same with something wrong in them."""

from typing import Any

from hypothesis import strategies as st

ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_SHORT = 3


def allowed(schema: dict[str, Any], components: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """What the schema allows, and not too much of it."""
    if "$ref" in schema:
        return allowed(components[schema["$ref"].rpartition("/")[2]], components, depth + 1)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema:
        return st.one_of([allowed(one, components, depth) for one in schema["anyOf"]])
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            low, high = schema.get("minimum", -(2**63)), schema.get("maximum", 2**63 - 1)
            return st.integers(max(low, 0), min(high, 5)) | st.integers(low, high)
        case "number":
            return st.floats(0, 2) | st.floats(allow_nan=False, allow_infinity=False)
        case "string":
            return st.from_regex(schema["pattern"], fullmatch=True) if "pattern" in schema else st.text(max_size=20)
        case "array":
            low = schema.get("minItems", 0)
            return st.lists(
                allowed(schema.get("items", {}), components, depth + 1), min_size=low, max_size=low + _SHORT
            )
        case "object" if "properties" in schema:
            return _structure(schema, components, depth)
        case "object":
            values = schema.get("additionalProperties") or {}
            return st.dictionaries(st.text(max_size=8), allowed(values, components, depth + 1), max_size=_SHORT)
        case _:
            return ANYTHING


def _structure(schema: dict[str, Any], components: dict[str, Any], depth: int) -> st.SearchStrategy[Any]:
    fields = {name: allowed(one, components, depth + 1) for name, one in schema["properties"].items()}
    wanted = {name: fields[name] for name in schema.get("required", ())}
    optional = [name for name in fields if name not in wanted]

    @st.composite
    def draw(draw: st.DrawFn) -> dict[str, Any]:
        some = draw(st.lists(st.sampled_from(optional), max_size=4, unique=True)) if optional else []
        return {name: draw(one) for name, one in (wanted | {name: fields[name] for name in some}).items()}

    return draw()


def spoiled(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[Any]:
    """The same with a field replaced, added or left out, or something else altogether."""

    @st.composite
    def draw(draw: st.DrawFn) -> Any:
        value = draw(values)
        for _ in range(draw(st.integers(1, 2))):
            name = draw(st.sampled_from([*value, "new"]))
            if draw(st.booleans()):
                value[name] = draw(ANYTHING)
            else:
                value.pop(name, None)
        return value

    return draw() | ANYTHING
