"""Log-probabilities of a step's tokens and of its prompts' tokens, as words for whoever asked.

They are those of the model's own logits, before any request changes them. Knows tensors; who asked is in `extras.py`.

Shape suffixes: R rows, V vocabulary, W words of a row, P prompt tokens, D hidden size.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from tercet.ipc.messages import MAX_LOGPROBS
from tercet.ipc.step_messages import Logs, PromptLogs
from tercet.model.decoder import Decoder
from tercet.triton_kernels.log_probabilities import log_probabilities

_BLOCK = 64
"""Prompt tokens whose logits are there at a time."""


@dataclass(frozen=True)
class Chunk:
    """A part of a prompt in a step, whose tokens' log-probabilities are wanted."""

    row: int
    """Of the step's results."""
    first_token: int
    """Among the step's tokens."""
    slot: int
    start: int
    length: int
    """How many of its tokens are followed by one of the prompt."""


def token_logs(logits_RV: Tensor, token_ids_R: Tensor) -> Tensor:
    """Words [R, W] of each row's token and of as many of the likeliest as anybody may ask for. Graph-safe."""
    return log_probabilities(logits_RV, token_ids_R, min(MAX_LOGPROBS, logits_RV.shape[1]))


def prompt_logs(decoder: Decoder, hidden_TD: Tensor, chunk: Chunk, token_ids_SL: Tensor) -> Tensor:
    """int32 [P, W] of the tokens that follow the chunk's, in blocks of one size: a GPU would compile for others."""
    blocks = []
    for first in range(0, chunk.length, _BLOCK):
        size = min(_BLOCK, chunk.length - first)
        padding = _BLOCK - size if hidden_TD.is_cuda else 0
        hidden_PD = hidden_TD[chunk.first_token + first : chunk.first_token + first + size]
        position = chunk.start + first + 1
        token_ids_P = pad(token_ids_SL[chunk.slot, position : position + size], (0, padding)).clone()
        blocks.append(token_logs(decoder.logits(pad(hidden_PD, (0, 0, 0, padding))), token_ids_P)[:size])
    return torch.cat(blocks)


def warm_up_prompt_logs(decoder: Decoder, token_ids_SL: Tensor) -> None:
    """Compile what `prompt_logs` launches."""
    hidden_TD = torch.zeros(1, decoder.config.hidden_size, dtype=decoder.dtype, device=token_ids_SL.device)
    prompt_logs(decoder, hidden_TD, Chunk(0, 0, 0, 0, 1), token_ids_SL)


class HostCopy:
    """A tensor on its way to the host; whole once the step's event is."""

    def __init__(self, words: Tensor) -> None:
        self._host = words
        if words.is_cuda:
            self._host = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
            self._host.copy_(words, non_blocking=True)

    def numpy(self) -> NDArray[np.int32]:
        array: NDArray[np.int32] = self._host.numpy()
        return array


@dataclass(frozen=True)
class StepLogs:
    """What one step says beyond its tokens."""

    rows: NDArray[np.intp]
    """Those of the step's results whose log-probabilities are wanted."""
    places: NDArray[np.intp]
    """Where each of them is in `words`."""
    words: HostCopy
    prompts: list[tuple[Chunk, HostCopy]]

    def messages(self) -> tuple[Logs | None, tuple[PromptLogs, ...]]:
        """For the scheduler, once the step is complete."""
        words = self.words.numpy()[self.places]
        logs = Logs(self.rows.astype(np.int32).tobytes(), _num_top(words), words.tobytes()) if len(words) else None
        prompts = []
        for chunk, copy in self.prompts:
            words = copy.numpy()
            prompts.append(PromptLogs(chunk.row, chunk.start + 1, _num_top(words), words.tobytes()))
        return logs, tuple(prompts)


def _num_top(words: NDArray[np.int32]) -> int:
    return int(words.shape[1]) // 2 - 1
