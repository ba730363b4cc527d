"""How deep what a client sent is nested: what could be decoded may be too deep to be encoded again. Pure."""

MAX_LEVELS = 128
"""Of what goes to a chat template and has no shape of its own: tools, and arguments of their calls."""


def is_nested_deeper(value: object, most_levels: int) -> bool:
    """Level by level, as Python could not go down into everything that can come."""
    level = [value]
    for _ in range(most_levels + 1):
        level = [part for whole in level for part in _parts(whole)]
        if not level:
            return False
    return True


def _parts(whole: object) -> list[object]:
    if isinstance(whole, dict):
        return list(whole.values())
    return whole if isinstance(whole, list) else []
