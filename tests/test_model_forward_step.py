"""One step's launches: what its shape says reaches the decoder, whatever kind of step it is."""

from typing import Any

import pytest
import torch

from checkpoints import checkpoint
from paged_sequences import make_decoder
from tercet.model.forward_step import forward_step
from tercet.model.kv_cache import make_kv_cache
from tercet.model.runner_settings import GuessSettings
from tercet.model.slots import make_slot_table
from tercet.model.step_buffers import StepBuffers
from tercet.model.step_shape import StepShape

CPU = torch.device("cpu")
GUESSES = GuessSettings(num_guesses=3, looked_up=(1, 4), most_slots=2)


@pytest.mark.parametrize(
    "shape",
    [
        StepShape(2, 0, 0, longest=768),
        StepShape(8, 0, 0, longest=4096, num_trials=2, num_guesses=3),
        StepShape(0, 1, 64, whole_logits=True, deep=8192),
    ],
    ids=["decodes", "trials", "prefill"],
)
def test_attention_is_told_of_lengths(shape: StepShape, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make_decoder(checkpoint("llama"))
    told: list[dict[str, Any]] = []
    forward = decoder.forward

    def listen(*tables: Any, **lengths: Any) -> torch.Tensor:
        told.append(lengths)
        return forward(*tables, **lengths)

    monkeypatch.setattr(decoder, "forward", listen)
    cache = make_kv_cache(decoder.config, 4, 16, decoder.dtype, CPU, 1)
    buffers = StepBuffers(16, 128, torch.zeros(256, dtype=torch.int32))
    forwarded = forward_step(decoder, cache.layers, make_slot_table(2, 32, 16, CPU), buffers, shape, GUESSES)
    assert told == [{"longest": shape.longest, "deep": shape.deep, "hear": None}]
    assert (forwarded.trials is None) == (not shape.num_trials)
