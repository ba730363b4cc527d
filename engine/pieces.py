"""What each token id adds to a text: the checkpoint's decoder, taken apart so that it works one token at a time.

Two families cover today's decoders. Byte-level: each token is a run of bytes, and the bytes of all tokens are UTF-8.
Metaspace: each token is a text with `▁` for the space, except byte tokens (`<0xE2>`), whose runs are UTF-8 or else one
replacement character a byte. A decoder outside of these is refused by name. Nothing here has per-request state.
"""

import json
from typing import Any

from tokenizers import Tokenizer

from tercet.engine.errors import UnsupportedModel


class Pieces:
    """The part of the text that each token stands for. Filled on demand: a vocabulary is large, a text is not."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # Not the whole as JSON: a vocabulary takes a tenth of a second and more.
        rules = _rules(None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__()))
        self.byte_level: bool = rules["byte_level"]
        """All tokens are bytes of one UTF-8 text; otherwise only byte tokens are bytes, run by run."""
        self.separator: str = rules["separator"]
        """Between any two tokens."""
        self.strip: int = rules["strip"]
        """Spaces that the decoder takes off the front of a text."""
        self._byte_fallback: bool = rules["byte_fallback"]
        self._replace: list[tuple[str, str]] = rules["replace"]
        self.first_token_drops: str = rules["first_token_drops"]
        """A character that the first token of a text loses wherever it has it, before anything is replaced."""
        self._tokenizer = tokenizer
        self.special_ids = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._pieces: dict[int, str | bytes] = {}

    def __getitem__(self, token_id: int) -> str | bytes:
        """Text, or bytes that are text only together with their neighbours. An id without a token is empty."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make(token_id)
        return piece

    def token(self, token_id: int) -> str:
        """The vocabulary's own spelling."""
        return self._tokenizer.id_to_token(token_id) or ""

    def text(self, token: str) -> str:
        """What a metaspace token says."""
        for old, new in self._replace:
            token = token.replace(old, new)
        return token

    def _make(self, token_id: int) -> str | bytes:
        token = self.token(token_id)
        if not self.byte_level:
            byte = _byte_token(token) if self._byte_fallback else None
            return self.text(token) if byte is None else byte
        try:
            raw = bytes(_BYTE_OF[char] for char in token)
        except KeyError:  # an added token may hold characters outside of the byte alphabet: it stands for itself
            return token
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw


def _rules(decoder: dict[str, Any] | None) -> dict[str, Any]:
    rules: dict[str, Any] = {
        "byte_level": False,
        "byte_fallback": False,
        "separator": "",
        "strip": 0,
        "replace": [],
        "first_token_drops": "",
    }
    if decoder is None:
        return rules | {"separator": " "}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    fused = False
    for step in steps:
        match step:
            case {"type": "ByteLevel"} if len(steps) == 1:
                rules["byte_level"] = True
            case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": str(scheme)} if len(steps) == 1:
                rules["replace"] = [(mark, " ")]
                rules["first_token_drops"] = "" if scheme == "never" else mark
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
                rules["replace"].append((old, new))
            case {"type": "ByteFallback"} if not fused:
                rules["byte_fallback"] = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                rules["strip"] = start
            case _:
                raise UnsupportedModel(
                    f"the tokenizer's decoder has a step {json.dumps(step, ensure_ascii=False)} that cannot be "
                    "streamed yet; want ByteLevel, Metaspace, or Replace, ByteFallback, Fuse and Strip in this order"
                )
    return rules


def _byte_token(token: str) -> bytes | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return None
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where it prints, else the next free character from 256 on."""
    printing = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    alphabet = {chr(byte): byte for byte in printing}
    others = (byte for byte in range(256) if byte not in set(printing))
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
