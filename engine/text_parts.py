"""Texts are encoded in parts, and the ids of parts are kept: a chat's next turn takes no longer than what it adds.

Templates write added tokens such as `<|im_start|>` between messages. A tokenizer finds those first and encodes what is
between them apart, so that a text can be cut in front of one: its parts have the ids that the whole has.
"""

import itertools
import json
import re
import threading
import unicodedata
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from sys import getsizeof
from typing import Literal

from tokenizers import AddedToken, Tokenizer

_LEAST_CHARACTERS = 256
"""Of a part, but for a text's last: what has many short messages is not a part for each."""
_MOST_BYTES = 64 << 20
"""Of what is kept: chats of some eight million tokens."""


def cut_tokens(tokenizer: Tokenizer, sources: Iterable[str]) -> list[str]:
    """The added tokens that a template's sources name in front of which a text may be cut."""
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.normalized]
    named = [token for token in added if any(token.content in source for source in sources)]
    return sorted(token.content for token in named if _may_cut(token, added) and _cuts_well(token.content, tokenizer))


def _may_cut(token: AddedToken, added: Sequence[AddedToken]) -> bool:
    """Whether wherever this token is written, one begins, and it leaves what is before it as it is."""
    content = token.content
    kind = unicodedata.category(content[:1] or " ")
    if kind[0] not in "PS" or kind == "Pc":
        return False  # a token before it may take spaces behind itself, or mind letters there, as which `_` counts
    for other in added:
        begun = other.content.startswith(content)  # where this one is written the longer one may be
        if begun and (other.lstrip or other.single_word):
            return False
        for inside in range(1, len(other.content)):
            rest = other.content[inside:]
            if rest.startswith(content) or content.startswith(rest):
                return False
    return True


def _cuts_well(content: str, tokenizer: Tokenizer) -> bool:
    """A trial, for tokenizers with steps that are not as those known."""
    texts = "a b", f"{content} c d\n", f"{content}{content}e \n", f"{content}f"
    try:
        whole, *apart = [tokenizer.encode(text, add_special_tokens=False).ids for text in ("".join(texts), *texts)]
    except Exception:  # noqa: BLE001  the library raises plain Exception: of letters that a vocabulary lacks
        return False
    return whole == list(itertools.chain(*apart))


def frame_fault(tokenizer: Tokenizer, of: Literal["single", "pair"] = "single") -> str | None:
    """What of a tokenizer.json's post-processor the library would panic over at any text or pair, if anything; or what
    it would leave out of a pair."""
    steps = [] if tokenizer.post_processor is None else [json.loads(tokenizer.post_processor.__getstate__())]
    while steps:
        step = steps.pop()
        steps += step.get("processors", ())
        for piece in step.get(of, ()):
            match piece:
                case {"SpecialToken": {"id": name}} if name not in step["special_tokens"]:
                    return f"its post-processor writes {name!r}, which is not among its special_tokens"
                case {"Sequence": {"id": "B"}} if of == "single":
                    return "its post-processor writes a second text where there is one; want $A"
        written = [piece["Sequence"]["id"] for piece in step.get(of, ()) if "Sequence" in piece]
        if of == "pair" and of in step and sorted(written) != ["A", "B"]:
            return f"its post-processor writes {' and '.join(written) or 'nothing'} of two; want $A and $B"
    return None


def frame(tokenizer: Tokenizer) -> "tuple[array[int], array[int]] | None":
    """The ids that tokenizer.json puts in front of every text and behind it; None where it is not as simple as that."""
    try:
        encoded = [
            [tokenizer.encode(text, add_special_tokens=special).ids for special in (False, True)]
            for text in ("a", "b c\n", "")
        ]
    except Exception:  # noqa: BLE001  as above
        return None
    bare, whole = encoded[0]
    for at in range(len(whole) - len(bare) + 1):
        begin, end = whole[:at], whole[at + len(bare) :]
        if all(begin + bare + end == whole for bare, whole in encoded):
            return array("i", begin), array("i", end)
    return None


class TextParts:
    """Encodes texts by their parts. Thread-safe."""

    def __init__(
        self,
        encode: Callable[[list[str]], list[list[int]]],
        tokens: Sequence[str],
        *,
        least_characters: int = _LEAST_CHARACTERS,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        """`encode`: any texts; `tokens`: in front of which a text may be cut."""
        self._encode = encode
        self._cut = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        self._least_characters = least_characters
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        """int32 ids by salt and text, the least recently used first."""
        self.num_bytes = 0
        """Of what is kept."""

    def encode(self, text: str, salt: str = "") -> "array[int]":
        """Its ids. Who does not know the salt cannot tell by the time it takes which parts have come before."""
        if self._cut is None:
            (ids,) = self._encode([text])
            return array("i", ids)
        parts = list(self._parts(text, self._cut))
        with self._lock:
            ids_of = {part: known for part in parts if (known := self._look_up((salt, part))) is not None}
        if new := [part for part in dict.fromkeys(parts) if part not in ids_of]:
            ids_of |= {part: array("i", ids).tobytes() for part, ids in zip(new, self._encode(new), strict=True)}
            with self._lock:
                for part in new:
                    self._keep((salt, part), ids_of[part])
        return array("i", b"".join([ids_of[part] for part in parts]))

    def _parts(self, text: str, cut: re.Pattern[str]) -> Iterator[str]:
        """What a text begins with does not depend on how it goes on, but for the last part."""
        begin = 0
        while found := cut.search(text, begin + self._least_characters):
            yield text[begin : found.start()]
            begin = found.start()
        yield text[begin:]

    def _look_up(self, key: tuple[str, str]) -> bytes | None:
        ids = self._kept.get(key)
        if ids is not None:
            self._kept.move_to_end(key)
        return ids

    def _keep(self, key: tuple[str, str], ids: bytes) -> None:
        if key in self._kept:  # another thread was as fast
            return
        self._kept[key] = ids
        self.num_bytes += _size(key, ids)
        while self.num_bytes > self._most_bytes:
            self.num_bytes -= _size(*self._kept.popitem(last=False))


def _size(key: tuple[str, str], ids: bytes) -> int:
    return sum(map(getsizeof, (key, *key, ids)))
