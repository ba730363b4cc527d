"""Token ids to text, one at a time: never half a character, never the beginning of a stop string.

Pure. One `Detokenizer` per request; its work per token does not grow with the text. All it has returned, in order, is
the decoding of all ids, as far as a stop string has not cut it short.
"""

import codecs
from collections.abc import Sequence

from tercet.engine.pieces import Pieces


class Detokenizer:
    """The text of one request."""

    def __init__(
        self,
        pieces: Pieces | None,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """`prompt_ids`: what the text goes on from. At the beginning of a text, some decoders drop spaces."""
        self._assembler: _ByteLevel | _Metaspace | None = None
        if pieces is not None and pieces.byte_level:
            self._assembler = _ByteLevel(pieces, skip_special_tokens)
        elif pieces is not None:
            self._assembler = _Metaspace(pieces, skip_special_tokens, prompt_ids)
        self._matchers = [_Matcher(text) for text in stop]
        self._include_stop = include_stop
        self._unwatched = min_tokens
        """Tokens that still come before stop strings count: those that end behind them, wherever they begin."""
        self._held = ""
        """Text that may turn out to be the beginning of a stop string."""
        self.stop_hit: str | None = None
        """The stop string that ended the text; nothing is to be pushed from then on."""

    def push(self, token_id: int) -> str:
        """The text that is certain now."""
        if self._assembler is None:
            return ""
        text = self._assembler.push(token_id)
        if not self._matchers:
            return text
        counts = self._unwatched == 0
        self._unwatched -= not counts
        return self._watch(text, counts) if text else ""

    def finish(self) -> str:
        """The rest of the text: what was held back, and a replacement character for bytes that make no character."""
        if self._assembler is None or self.stop_hit is not None:
            return ""
        text = self._assembler.finish()
        if text and self._matchers:
            text = self._watch(text, self._unwatched == 0)
        held, self._held = self._held, ""
        return text + held

    def _watch(self, text: str, counts: bool) -> str:
        hits = [(matcher.advance(text, counts), -len(matcher.text), matcher.text) for matcher in self._matchers]
        ends = [hit for hit in hits if hit[0] >= 0]
        text, offset = self._held + text, len(self._held)
        if not ends:
            # The longest beginning of a stop string that the text ends with.
            keep = max(matcher.matched for matcher in self._matchers)
            cut = len(text) - keep
            self._held = text[cut:]
            return text[:cut]
        # The stop string that is complete first; of two that end together, the longer.
        end, negative_length, self.stop_hit = min(ends)
        self._held = ""
        return text[: offset + end + (0 if self._include_stop else negative_length)]


class _Matcher:
    """Searches one stop string in a text that comes in parts: each character is looked at about once."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """Characters of the stop string that the text so far ends with."""
        self._fallback = [0, 0]
        """Of each beginning of the stop string that a text has had: how many characters are left if the next is wrong.

        Not of all at once: a request may have 256 answers, with 16 stop strings of 1,024 characters each.
        """

    def advance(self, part: str, counts: bool) -> int:
        """Where in `part` the stop string ends, or -1; where it does not count yet, the search goes on behind it."""
        stop, matched = self.text, self.matched
        if matched == 0 and stop[0] not in part:
            return -1
        for position, char in enumerate(part):
            while matched and char != stop[matched]:
                matched = self._fallback[matched]
            if char == stop[matched]:
                matched += 1
                if matched == len(stop) and counts:
                    return position + 1
                if matched == len(self._fallback):
                    self._extend()
                if matched == len(stop):
                    matched = self._fallback[matched]
        self.matched = matched
        return -1

    def _extend(self) -> None:
        """By the beginning that is one character longer."""
        last = self.text[len(self._fallback) - 1]
        left = self._fallback[-1]
        while left and last != self.text[left]:
            left = self._fallback[left]
        self._fallback.append(left + 1 if last == self.text[left] else 0)


class _ByteLevel:
    """All tokens are bytes of one UTF-8 text."""

    def __init__(self, pieces: Pieces, skip_special_tokens: bool) -> None:
        self._pieces = pieces
        self._skipped = pieces.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._inside = False
        """The bytes so far end inside a character."""

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._pieces[token_id]
        if not self._inside and isinstance(piece, str):
            return piece
        text = self._decoder.decode(piece.encode() if isinstance(piece, str) else piece)
        self._inside = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        self._inside = False
        return self._decoder.decode(b"", final=True)


class _Metaspace:
    """Tokens are text; a run of byte tokens is a text of its own, known only when the run has ended."""

    def __init__(self, pieces: Pieces, skip_special_tokens: bool, prompt_ids: Sequence[int]) -> None:
        self._pieces = pieces
        self._skipped = pieces.special_ids if skip_special_tokens else frozenset()
        self._run = b""
        self._first = True
        self._strip = pieces.strip
        for token_id in prompt_ids:  # as far as they decide what becomes of the next
            if not (self._first or self._strip):
                break
            self.push(token_id)
        self.finish()

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._pieces[token_id]
        if isinstance(piece, bytes):
            self._run += piece
            return ""
        if not piece:  # no such token
            return ""
        if self._first and self._pieces.first_token_drops:
            piece = self._pieces.text(self._pieces.token(token_id).replace(self._pieces.first_token_drops, ""))
        text = self._end_run() + ("" if self._first else self._pieces.separator) + piece
        self._first = False
        return self._stripped(text) if self._strip else text

    def finish(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, b""
        if not run:
            return ""
        self._first = False
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text
