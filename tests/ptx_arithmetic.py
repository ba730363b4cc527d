"""Of a compiled attention kernel's PTX: how each score came from its product, as expressions without names.

A compiler fuses multiplications with additions element by element, as it sees fit. Where two scores of a tile have
different expressions, a row's bits follow from where in a tile it stands, or from which of two loops took the tile.
"""

import re
from collections import Counter

_INSTRUCTION = re.compile(r"(?:@!?%p\d+ )?([a-z][\w.:]*)\s+(.*);")
_OPERAND = re.compile(r"%\w+|0f[0-9A-F]{8}")
_ARITHMETIC = {"mul", "add", "sub", "neg", "fma", "div", "rcp", "ex2"}


def exponentials(ptx: str) -> Counter[str]:
    """Expressions of the exponentials that are taken of products, and how many elements have each."""
    made: dict[str, str] = {}
    found: Counter[str] = Counter()
    for line in ptx.splitlines():
        if not (match := _INSTRUCTION.match(line.strip())):
            continue
        name, *kinds = match[1].split(".")
        if "mma_async" in kinds or name == "mma":
            made |= dict.fromkeys(_OPERAND.findall(match[2].partition("}")[0]), "product")
        elif operands := _OPERAND.findall(match[2]):
            target, *sources = operands
            known = [made.get(source, "%" if source.startswith("%") else source) for source in sources]
            made[target] = _expression(name, kinds, known)
            if name == "ex2" and "product" in made[target]:
                found[made[target]] += 1
    return found


def _expression(name: str, kinds: list[str], sources: list[str]) -> str:
    """What one instruction makes: factors and summands sorted, all that is not computed here without a name."""
    match name:
        case "mov":
            return sources[0] if sources else "%"
        case "selp":
            # A mask: what it keeps, not the constant.
            return min(sources[:2], key=lambda source: source.startswith("0f"))
        case "max":
            return "max"
        case "fma":
            sources[:2] = sorted(sources[:2])
        case "mul" | "add":
            sources.sort()
    # The assembler may fuse what is not said to be rounded: which, only it knows.
    unsure = "?" if name in ("add", "sub") and any(source.startswith("mul") for source in sources) else ""
    return f"{name}{unsure}({', '.join(sources)})" if name in _ARITHMETIC and kinds[-1:] == ["f32"] else "%"
