"""What one step says beyond its tokens, to whoever asked: log-probabilities and hidden states. Read on the host."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tercet.ipc.step_messages import Beyond, Hidden, Logs, PromptLogs
from tercet.model.host_copies import HostCopy
from tercet.model.token_logs import Chunk


@dataclass(frozen=True)
class StepLogs:
    """Log-probabilities."""

    rows: NDArray[np.intp]
    """Those of the step's results whose log-probabilities are wanted."""
    places: NDArray[np.intp]
    """Where each of them is in `words`."""
    words: HostCopy
    prompts: list[tuple[Chunk, list[HostCopy]]]

    def of_tokens(self) -> Logs | None:
        """Once."""
        words = self.words.read()[self.places]
        return Logs(self.rows.astype(np.int32).tobytes(), _num_top(words), words.tobytes()) if len(words) else None

    def of_prompts(self) -> tuple[PromptLogs, ...]:
        """Once."""
        prompts = []
        for chunk, blocks in self.prompts:
            words = np.concatenate([block.read() for block in blocks])
            prompts.append(PromptLogs(chunk.row, chunk.start + 1, _num_top(words), words.tobytes()))
        return tuple(prompts)


@dataclass(frozen=True)
class HiddenRows:
    """Hidden states."""

    rows: NDArray[np.intp]
    """Those of the step's results whose hidden state is wanted."""
    places: NDArray[np.intp]
    """Where each of them is in `words`."""
    words: HostCopy
    """Rows of numbers of `dtype`."""
    dtype: torch.dtype

    def messages(self) -> tuple[Hidden, ...]:
        """Once."""
        values = torch.from_numpy(self.words.read()[self.places]).view(self.dtype).float().numpy()
        return tuple(Hidden(int(row), one.tobytes()) for row, one in zip(self.rows, values, strict=True))


@dataclass(frozen=True)
class StepExtra:
    """Of a step that has any of it."""

    logs: StepLogs | None
    hidden: HiddenRows | None

    def messages(self) -> Beyond:
        """For the scheduler, once the step is complete."""
        of_tokens, of_prompts = (None, ()) if self.logs is None else (self.logs.of_tokens(), self.logs.of_prompts())
        return of_tokens, of_prompts, () if self.hidden is None else self.hidden.messages()


def _num_top(words: NDArray[np.int32]) -> int:
    return int(words.shape[1]) // 2 - 1
