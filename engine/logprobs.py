"""Log-probabilities from the workers' words to what a client reads. Pure, and without numpy: the tokenizer starts fast.

A row's words are int32: bits of the fp32 log-probability of the token, its rank, then the ids of the likeliest tokens
and the bits of theirs.
"""

from collections.abc import Iterator

from tercet.engine.pieces import Pieces
from tercet.ipc.answers import TokenLogprob
from tercet.ipc.beyond import Logs, PromptLogs


def unpack_rows(logs: Logs) -> "memoryview[int]":
    return memoryview(logs.rows).cast("i")


def unpack_words(logs: Logs | PromptLogs) -> Iterator[memoryview]:
    """The bytes of each row's 2 + 2 * num_top words."""
    words, size = memoryview(logs.words), 4 * (2 + 2 * logs.num_top)
    return (words[start : start + size] for start in range(0, len(words), size))


def read_row(words: memoryview, token_id: int, num_wanted: int, pieces: Pieces | None) -> list[TokenLogprob]:
    """The token itself, then the `num_wanted` likeliest."""
    ids, values = words.cast("i"), words.cast("f")
    num_top = len(ids) // 2 - 1
    row = [TokenLogprob(token_id, values[0], ids[1], _bytes_of(token_id, pieces))]
    for rank in range(min(num_wanted, num_top)):
        other = ids[2 + rank]
        row.append(TokenLogprob(other, values[2 + num_top + rank], rank + 1, _bytes_of(other, pieces)))
    return row


def _bytes_of(token_id: int, pieces: Pieces | None) -> bytes:
    if pieces is None:
        return b""
    piece = pieces[token_id]
    return piece.encode() if isinstance(piece, str) else piece
