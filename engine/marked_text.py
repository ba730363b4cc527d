"""An answer's text, parted at marks that are tokens of their own.

A model may also spell a mark by other tokens, when it talks about one. The tokens that have come tell which is which:
marks stand in the text in the order of their tokens. Pure; it knows no format.
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tercet.engine.lark import Marks
from tercet.engine.tool_calls import held_back


class Found(NamedTuple):
    """A mark, or text between marks."""

    text: str
    place: int
    """Where it begins in the answer's text."""
    is_mark: bool


class MarkedText:
    """Of one answer."""

    def __init__(self, marks: Sequence[str], ids: Marks) -> None:
        """`ids`: of the marks that are tokens. One that is none is a mark wherever it is spelled."""
        self._pattern = re.compile("|".join(map(re.escape, marks)))
        self._by_id = {ids[mark]: mark for mark in marks if mark in ids}
        self._spelled = [mark for mark in marks if mark not in ids]
        self._due: deque[tuple[str, int]] = deque()
        """Marks whose tokens have come and whose texts have not been found, each with its token's number."""
        self._num_tokens = 0
        self._rest = ""
        self._place = 0
        """Where the rest begins."""

    def feed(self, text: str, token_ids: Sequence[int]) -> Iterator[Found]:
        """What has become clear with this text."""
        for number, token_id in enumerate(token_ids, self._num_tokens):
            if token_id in self._by_id:
                self._due.append((self._by_id[token_id], number))
        self._num_tokens += len(token_ids)
        self._rest += text
        return self._parted(is_last=False)

    def finish(self) -> Iterator[Found]:
        """The rest, when no more text comes."""
        return self._parted(is_last=True)

    @property
    def is_due(self) -> bool:
        """A mark has come, and not its text."""
        return bool(self._due)

    def _parted(self, *, is_last: bool) -> Iterator[Found]:
        at = 0
        while found := self._pattern.search(self._rest, at):
            is_mark = self._is_mark(found, is_last=is_last)
            if is_mark is None:
                yield from self._take(found.start(), is_mark=False)
                return
            at = found.end()
            if is_mark:
                yield from self._take(found.start(), is_mark=False)
                yield from self._take(len(found[0]), is_mark=True)
                at = 0
        yield from self._take(len(self._rest) - (0 if is_last else self._held_back()), is_mark=False)

    def _is_mark(self, found: re.Match[str], *, is_last: bool) -> bool | None:
        """None: what comes next will tell."""
        if found[0] in self._spelled:
            return True
        if not self._due or self._due[0][0] != found[0]:
            return False
        behind, next_number = found.string[found.end() :], self._due[0][1] + 1
        if next_number == self._num_tokens and (behind or not is_last):
            return False if behind else None  # behind the last token there is no text
        if len(self._due) > 1 and next_number == self._due[1][1]:  # one behind the other, as their texts have to be
            mark = self._due[1][0]
            if not behind.startswith(mark):
                if not mark.startswith(behind):
                    return False
                if not is_last:
                    return None
        self._due.popleft()
        return True

    def _held_back(self) -> int:
        """How many characters at the end may be the beginning of a mark."""
        awaited = [*self._spelled, *(mark for mark, _ in self._due)]
        return max((held_back(self._rest, mark) for mark in awaited), default=0)

    def _take(self, length: int, *, is_mark: bool) -> Iterator[Found]:
        text, self._rest = self._rest[:length], self._rest[length:]
        place, self._place = self._place, self._place + length
        if text:
            yield Found(text, place, is_mark)
