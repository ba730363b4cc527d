"""Log-probabilities from the workers' words to what a client reads. Pure.

A row's words are int32: bits of the fp32 log-probability of the token, its rank, then the ids of the likeliest tokens
and the bits of theirs.
"""

import numpy as np
from numpy.typing import NDArray

from tercet.engine.pieces import Pieces
from tercet.ipc.messages import TokenLogprob
from tercet.ipc.step_messages import Logs, PromptLogs

MAX_LOGPROBS = 20


def select_rows(logs: Logs | None, rows: NDArray[np.intp]) -> Logs | None:
    """The logs of these rows of a step, where there are any, under their place among `rows`."""
    if logs is None:
        return None
    wanted = {int(row): place for place, row in enumerate(rows)}
    kept = [(index, wanted[row]) for index, row in enumerate(unpack_rows(logs).tolist()) if row in wanted]
    if not kept:
        return None
    words = unpack_words(logs)[[index for index, _ in kept]]
    return Logs(np.array([place for _, place in kept], np.int32).tobytes(), logs.num_top, words.tobytes())


def unpack_rows(logs: Logs) -> NDArray[np.int32]:
    return np.frombuffer(logs.rows, np.int32)


def unpack_words(logs: Logs | PromptLogs) -> NDArray[np.int32]:
    """[rows, 2 + 2 * num_top]."""
    return np.frombuffer(logs.words, np.int32).reshape(-1, 2 + 2 * logs.num_top)


def read_row(words: NDArray[np.int32], token_id: int, num_wanted: int, pieces: Pieces | None) -> list[TokenLogprob]:
    """The token itself, then the `num_wanted` likeliest."""
    num_top = len(words) // 2 - 1
    values = words.view(np.float32)
    row = [TokenLogprob(token_id, float(values[0]), int(words[1]), _bytes_of(token_id, pieces))]
    for rank in range(min(num_wanted, num_top)):
        other = int(words[2 + rank])
        row.append(TokenLogprob(other, float(values[2 + num_top + rank]), rank + 1, _bytes_of(other, pieces)))
    return row


def _bytes_of(token_id: int, pieces: Pieces | None) -> bytes:
    if pieces is None:
        return b""
    piece = pieces[token_id]
    return piece.encode() if isinstance(piece, str) else piece
