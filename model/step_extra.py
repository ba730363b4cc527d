"""What one step says beyond its tokens, to whoever asked: log-probabilities and embeddings. Made on the host."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tercet.ipc.beyond import Beyond, Logs, PromptLogs, Vector
from tercet.ipc.step_messages import Embedding
from tercet.model.host_copies import HostCopy
from tercet.model.score_head import ScoreHead
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
class StepVectors:
    """Embeddings, and logits of a head that classifies."""

    wanted: dict[int, Embedding]
    """By the step's chunks."""
    first_row: int
    """Of its results that is a chunk."""
    words: HostCopy
    """The chunks' hidden states behind the final norm, of this type."""
    dtype: torch.dtype
    scale: float
    """By which the model divides what it makes logits of: its norm has it in it (`shard.py`)."""
    head: ScoreHead | None = None
    """What classifies."""

    def messages(self) -> tuple[Vector, ...]:
        """Once. Sums are in fp64, so that a length is 1 to the last bits of fp32."""
        hidden_CD = torch.from_numpy(self.words.read()).view(self.dtype)
        vectors = []
        for chunk, how in self.wanted.items():
            hidden_D = hidden_CD[chunk].double().numpy()
            if how.classify:
                assert self.head is not None
                values = self.head.logits(hidden_D)
            else:
                values = hidden_D[: how.dimensions] * self.scale
            if how.normalize:
                values = values / (np.linalg.norm(values) or 1.0)
            made = values.astype(np.float32).tobytes() if np.isfinite(values).all() else b""
            vectors.append(Vector(self.first_row + chunk, made))
        return tuple(vectors)


@dataclass(frozen=True)
class StepExtra:
    """Of a step that has any of it."""

    logs: StepLogs | None
    vectors: StepVectors | None

    def messages(self) -> Beyond:
        """For the scheduler, once the step is complete."""
        of_tokens, of_prompts = (None, ()) if self.logs is None else (self.logs.of_tokens(), self.logs.of_prompts())
        return of_tokens, of_prompts, () if self.vectors is None else self.vectors.messages()


def _num_top(words: NDArray[np.int32]) -> int:
    return int(words.shape[1]) // 2 - 1
