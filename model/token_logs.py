"""Log-probabilities of a step's tokens and of its prompts' tokens, as words for whoever asked.

They are those of the model's own logits, before any request changes them. Knows tensors; who asked is in `extras.py`.

Shape suffixes: R rows, V vocabulary, W words of a row, P prompt tokens, D hidden size.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tercet.ipc.messages import MAX_LOGPROBS
from tercet.model.decoder import Decoder
from tercet.triton_kernels.embedding import embedding
from tercet.triton_kernels.log_probabilities import log_probabilities
from tercet.triton_kernels.slot_table import SlotTable, tokens_at

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
        logits_PV = decoder.head.logits(embedding(rows_P[block], hidden_TD))
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
