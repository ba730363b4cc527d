"""Log-probabilities of a step's tokens and of its prompts' tokens, as words for whoever asked.

They are those of the model's own logits, before any request changes them. Knows tensors; who asked is in `extras.py`.

Shape suffixes: R rows, V vocabulary, W words of a row, P prompt tokens, D hidden size.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tercet.ipc.messages import MAX_LOGPROBS
from tercet.ipc.step_messages import Logs, PromptLogs
from tercet.model.decoder import Decoder
from tercet.triton_kernels.embedding import embedding
from tercet.triton_kernels.log_probabilities import log_probabilities
from tercet.triton_kernels.slot_table import SlotTable, tokens_at
from tercet.triton_kernels.tiles import next_power_of_2

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


def prompt_logs(decoder: Decoder, hidden_TD: Tensor, chunk: Chunk, table: SlotTable) -> list[Tensor]:
    """int32 [P, W] of the tokens that follow the chunk's, in blocks of one size: a GPU would compile for others.

    What is behind the chunk's end pads the last block: rows of no token.
    """
    size = chunk.length if hidden_TD.device.type == "cpu" else -(-chunk.length // _BLOCK) * _BLOCK
    places_3P = np.full((3, size), -1, np.int32)
    places_3P[0, : chunk.length] = np.arange(chunk.first_token, chunk.first_token + chunk.length)
    places_3P[1, : chunk.length] = chunk.slot
    places_3P[2, : chunk.length] = np.arange(chunk.start + 1, chunk.start + 1 + chunk.length)
    rows_P, slots_P, positions_P = _to_device(places_3P, hidden_TD.device)
    blocks = []
    for first in range(0, size, _BLOCK):
        block = slice(first, first + _BLOCK)
        logits_PV = decoder.logits(embedding(rows_P[block], hidden_TD))
        logs_PW = token_logs(logits_PV, tokens_at(slots_P[block], positions_P[block], table))
        blocks.append(logs_PW[: chunk.length - first])
    return blocks


def warm_up_prompt_logs(decoder: Decoder, table: SlotTable) -> None:
    """Compile what `prompt_logs` launches."""
    device = table.token_ids_SL.device
    hidden_TD = torch.zeros(1, decoder.config.hidden_size, dtype=decoder.dtype, device=device)
    prompt_logs(decoder, hidden_TD, Chunk(0, 0, 0, 0, 1), table)


def _to_device(numbers: NDArray[np.int32], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(numbers)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class HostRooms:
    """Pinned memory for what is on its way to the host, used again and again.

    Torch's would be let go by the thread that has read it, and torch then notes on the stream when that was. A stream
    that is just being captured takes the note for a part of its graph, and to ask for it later is an error.
    """

    def __init__(self) -> None:
        self._free: dict[int, deque[Tensor]] = {}

    def take(self, num_words: int) -> Tensor:
        """int32, of at least so many words."""
        size = next_power_of_2(max(num_words, 1))
        free = self._free.setdefault(size, deque())
        return free.pop() if free else torch.empty(size, dtype=torch.int32, pin_memory=True)

    def give_back(self, room: Tensor) -> None:
        """By any thread."""
        self._free[len(room)].append(room)


class HostCopy:
    """A tensor of int32 on its way to the host; whole once the step's event is."""

    def __init__(self, words: Tensor, rooms: HostRooms) -> None:
        self._host, self._rooms, self._room = words, rooms, torch.empty(0)
        if words.is_cuda:
            self._room = rooms.take(words.numel())
            self._host = self._room[: words.numel()].view(words.shape)
            self._host.copy_(words, non_blocking=True)

    def read(self) -> NDArray[np.int32]:
        """Once, by any thread."""
        array: NDArray[np.int32] = self._host.numpy().copy()
        if len(self._room):
            self._rooms.give_back(self._room)
        return array


@dataclass(frozen=True)
class StepLogs:
    """What one step says beyond its tokens."""

    rows: NDArray[np.intp]
    """Those of the step's results whose log-probabilities are wanted."""
    places: NDArray[np.intp]
    """Where each of them is in `words`."""
    words: HostCopy
    prompts: list[tuple[Chunk, list[HostCopy]]]

    def messages(self) -> tuple[Logs | None, tuple[PromptLogs, ...]]:
        """For the scheduler, once the step is complete."""
        words = self.words.read()[self.places]
        logs = Logs(self.rows.astype(np.int32).tobytes(), _num_top(words), words.tobytes()) if len(words) else None
        prompts = []
        for chunk, blocks in self.prompts:
            words = np.concatenate([block.read() for block in blocks])
            prompts.append(PromptLogs(chunk.row, chunk.start + 1, _num_top(words), words.tobytes()))
        return logs, tuple(prompts)


def _num_top(words: NDArray[np.int32]) -> int:
    return int(words.shape[1]) // 2 - 1
