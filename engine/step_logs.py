"""Which words of a step's log-probabilities go on to the tokenizer. Pure; knows rows and nothing of requests."""

import numpy as np
from numpy.typing import NDArray

from tercet.ipc.beyond import Logs


def select_rows(logs: Logs | None, rows: NDArray[np.intp]) -> Logs | None:
    """The logs of these rows of a step, where there are any, under their place among `rows`."""
    if logs is None:
        return None
    wanted = {int(row): place for place, row in enumerate(rows)}
    all_rows = np.frombuffer(logs.rows, np.int32).tolist()
    kept = [(index, wanted[row]) for index, row in enumerate(all_rows) if row in wanted]
    if not kept:
        return None
    words = np.frombuffer(logs.words, np.int32).reshape(len(all_rows), -1)[[index for index, _ in kept]]
    return Logs(np.array([place for _, place in kept], np.int32).tobytes(), logs.num_top, words.tobytes())
