"""The settings in a GGUF file's metadata, taken one by one; what nobody took is a setting we would get wrong.

Knows types of values, and no setting's meaning (`gguf_config.py`, `gguf_rope.py`).
"""

import math
from collections.abc import Mapping
from typing import Any


class Settings:
    """Those of the file's architecture. ValueError names what is wrong, missing or left."""

    def __init__(self, source: str, architecture: str, metadata: Mapping[str, Any]) -> None:
        self.source = source
        self._architecture = architecture
        prefix = f"{architecture}."
        self._left = {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, default)

    def whole(self, name: str, default: int | None = None, *, or_zero: bool = False, most: int = 2**63 - 1) -> int:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < (0 if or_zero else 1):
            raise self.refusal(name, value, f"want {'0 or ' if or_zero else ''}a positive whole number")
        if value > most:
            raise self.refusal(name, value, f"want {most} at most")
        return value

    def number(self, name: str, default: float | None = None, *, above: float = 0, or_zero: bool = False) -> float:
        value = self.take(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (above < value < math.inf or (or_zero and value == 0)):
            raise self.refusal(name, value, f"want {'0 or ' if or_zero else ''}a number over {above}")
        return float(value)

    def text(self, name: str, default: str) -> str:
        return str(self.take(name, default))

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse a value that is there and is none of these."""
        if name in self and (value := self.take(name)) not in allowed:
            raise self.refusal(name, value, f"supported: {', '.join(repr(one) for one in allowed)}")

    def refusal(self, name: str, value: Any, wanted: str) -> ValueError:
        return ValueError(f"{self.source}: {self._architecture}.{name} is {value!r}; {wanted}")

    def check_all_taken(self) -> None:
        left = {name: value for name, value in self._left.items() if value not in (0, False, 0.0, "")}
        if left:
            names = ", ".join(f"{self._architecture}.{name}" for name in sorted(left))
            raise ValueError(f"{self.source}: settings that are not supported and may change the result: {names}")
