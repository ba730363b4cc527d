"""Which of an answer's tokens say what of it is told: its log-probabilities, part by part.

Pure: fed text and rows as they come, and asked for each part of the text in its order. What is between parts, such as
marks around them, is nobody's.
"""

import codecs
from collections import deque
from collections.abc import Sequence

from tercet.engine.openai_logprobs import Row

_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class SaidRows:
    """Of one answer."""

    def __init__(self) -> None:
        self._text = ""
        self._told = 0
        """Characters of it, up to the end of the last part."""
        self._rows: deque[Row] = deque()
        """Those that nobody has asked for."""
        self._place = 0
        """Where in the text the first one's token is."""
        self._silent: list[Row] = []
        """Those ahead of it that have added nothing yet: parts of a character, and what a text leaves out."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, text: str, rows: Sequence[Row]) -> None:
        """What is new. A text may come behind its tokens."""
        self._text += text
        self._rows += rows

    def take(self, said: str) -> list[Row]:
        """Rows of the tokens that say so. One that ends in what comes next is not told again."""
        begin = max(self._text.find(said, self._told), self._told)
        return self.take_at(begin, begin + len(said))

    def take_at(self, begin: int, end: int) -> list[Row]:
        """Those of a part whose place is known: from one character to before another, none of them taken yet."""
        self._told = end
        taken = []
        while self._rows and self._place < end:
            row = self._rows.popleft()
            self._silent.append(row)
            place = self._behind(self._decoder.decode(row[0].token))
            if place > self._place:
                taken += self._silent if place > begin else []
                self._silent = []
            self._place = place
        if self._place < end:  # the answer has ended within a character
            taken += self._silent
            self._silent, self._place = [], end
        return taken

    def _behind(self, token: str) -> int:
        """Where the text goes on behind a token."""
        place = self._place
        while True:
            # The first token's space may be left out.
            for own in (token, token[1:]) if place == 0 and token.startswith(" ") else (token,):
                there = self._text[place : place + len(own)]
                if there and own.startswith(there):
                    return place + len(own)
            # Bytes that are no character may be one in the text, or one each.
            if not (token and self._text.startswith(_NO_CHARACTER, place)):
                return self._place
            place += 1
