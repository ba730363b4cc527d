"""Layers that borrow keys and values: of prompts only the rows go through them, and nobody sees a difference."""

import json
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints import checkpoint, random_prompts, reference_model
from covering import long
from gemma4_fields import whole
from paged_sequences import Sequences, make_decoder
from tercet.model import compile_ahead, layers
from tercet.model.checkpoint import read_config
from tercet.model.decoder import Decoder
from tercet.model.padded_shapes import Shapes
from test_model_compile_ahead import launches, steps_of

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILY = "gemma4-told"
FIRST = 3
"""Of its six layers, the first that borrows."""


@pytest.fixture
def rows_of_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each layer has computed, one after the other."""
    counts: list[int] = []
    add = layers.Layer.add

    def counting(self: layers.Layer, residual: Any, attended_TH: Tensor, *rest: Any) -> None:
        counts.append(len(attended_TH))
        add(self, residual, attended_TH, *rest)

    monkeypatch.setattr(layers.Layer, "add", counting)
    return counts


def test_only_rows_go_through_them(rows_of_layers: list[int]) -> None:
    decoder = make_decoder(checkpoint(FAMILY))
    a, b = random_prompts(2, 40, 40, seed=3)
    run = Sequences(decoder, 2)
    run.step({}, {0: a[:30]}, pad_t=2)
    assert rows_of_layers == [32] * FIRST + [1] * 3
    rows_of_layers.clear()
    run.step({0: a[30]}, {1: b[:20]}, pad_b=1)
    assert rows_of_layers == [22] * FIRST + [3] * 3
    rows_of_layers.clear()
    run.step({0: a[31], 1: b[20]}, {})
    assert rows_of_layers == [2] * 6
    rows_of_layers.clear()
    run.whole = True  # once more with all tokens
    run.step({0: a[32]}, {1: b[21:30]})
    assert rows_of_layers == [10] * FIRST + [2] * 3 + [10] * FIRST + [2] * 3 + [10] * 3


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("cut", [(1,), (17,), (20, 21), (16, 32, 48), (7, 14, 21, 28, 35)])
def test_a_rows_bits_are_those_of_an_uncut_prompt(cut: tuple[int, ...], deterministic: bool) -> None:
    """Beside others or not."""
    decoder = make_decoder(checkpoint(FAMILY), deterministic=deterministic)
    ids, others = random_prompts(2, 60, 60, seed=4)
    wanted = Sequences(decoder, 2).step({}, {0: ids})[0]
    run = Sequences(decoder, 2, whole=True)
    run.step({}, {1: others[:30]})
    for index, (begin, end) in enumerate(zip((0, *cut), (*cut, len(ids)), strict=True)):
        got = run.step({1: others[30 + index]}, {0: ids[begin:end]}, pad_t=index)
    assert torch.equal(got[1], wanted)


def test_what_is_heard_is_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind layers that borrow, too: whoever hears reads every token."""
    path = checkpoint(FAMILY)
    (ids,) = random_prompts(1, 40, 40, seed=5)
    with torch.inference_mode():
        wanted = reference_model(path)(torch.tensor([ids]), output_hidden_states=True).hidden_states
    heard: dict[int, Tensor] = {}

    def hear(layer: int, stream_TD: Tensor) -> None:
        heard[layer] = stream_TD.clone()

    monkeypatch.setattr(Decoder, "forward", partialmethod(Decoder.forward, hear=hear))
    Sequences(make_decoder(path), 1).step({}, {0: ids})
    assert list(heard) == list(range(6))
    for layer, stream_TD in heard.items():
        torch.testing.assert_close(stream_TD, wanted[layer][0], rtol=1e-4, atol=1e-3)


def test_logits_of_every_token_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, beside decodes and other chunks."""
    path = checkpoint(FAMILY)
    decoder, whole = make_decoder(path), Decoder.forward_whole
    a, b = random_prompts(2, 50, 50, seed=6)
    with torch.inference_mode():
        wanted_a, wanted_b = (reference_model(path)(torch.tensor([ids])).logits[0] for ids in (a, b))
    found: list[Tensor] = []

    def forward_whole(self: Decoder, *tables: Any) -> tuple[Tensor, Tensor]:
        hidden_RD, hidden_TD = whole(self, *tables)
        found.append(self.head.logits(hidden_TD))
        return hidden_RD, hidden_TD

    monkeypatch.setattr(Decoder, "forward_whole", forward_whole)
    run = Sequences(decoder, 2, whole=True)
    run.step({}, {0: a[:-2], 1: b[:13]})
    run.step({0: a[-2]}, {1: b[13:14]})
    run.step({0: a[-1]}, {1: b[14:]}, pad_b=1, pad_t=1)
    first, second, third = found
    logits = [*first[48:], *second[1:], *third[2:-1]]
    torch.testing.assert_close(first[:48], wanted_a[:48], rtol=1e-4, atol=1e-4 * float(wanted_a.abs().max()))
    torch.testing.assert_close(torch.stack(logits), wanted_b, rtol=1e-4, atol=1e-4 * float(wanted_b.abs().max()))


@pytest.mark.parametrize("deterministic", [False, long(True)])
def test_compilers_know_all_kernels(deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Gemma 4 E2B, with as many layers and heads as it has."""
    fields = whole("E2B", vocab_size=1024, vocab_size_per_layer_input=1024)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    options = {"max_num_seqs": 20, "max_num_batched_tokens": 256, "max_model_len": 32_768}
    steps = replace(steps_of("gemma4-told", **options, deterministic=deterministic), config=read_config(tmp_path))
    ahead = launches(steps)
    assert any(what.startswith("fixed_decode" if deterministic else "few_rows_kernel") for what in ahead)
    monkeypatch.setattr(compile_ahead, "_few_layers", lambda config, kept: (config, kept))
    monkeypatch.setattr(Shapes, "for_compilers", lambda self: self.for_graphs())
    assert launches(steps) <= ahead
