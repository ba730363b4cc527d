"""Where q, k, v of long prompts end in attention's prologue: every token goes where it belongs, in one part or two."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from checkpoints import checkpoint
from paged_sequences import make_decoder
from tercet.model import attention
from tercet.model.residual import Normed, Residual
from tercet.triton_kernels.add_rms_norm import rms_norm_reference
from tercet.triton_kernels.attention_prologue import attention_prologue_reference
from tercet.triton_kernels.matmul import matmul_reference
from tercet.triton_kernels.matmul_prologue import matmul_prologue_reference
from tercet.triton_kernels.prepare import StepInputs

T, PAGE = 11, 16


class TwoParts(Residual):
    """A stream that is normed in two parts."""

    cut = 6

    def normed(self, norm_D: Tensor) -> Iterator[Normed]:
        for whole in super().normed(norm_D):
            assert whole.count_1 is not None
            yield Normed(slice(0, self.cut), whole.x_TD[: self.cut], whole.count_1)
            yield Normed(slice(self.cut, T), whole.x_TD[self.cut :], whole.count_1 - self.cut)


def only_counted(*arguments: Any) -> None:
    """As the kernel may: tokens behind those there are stay as they are."""
    *arguments, rows_1, first_row = arguments
    x_TK, w_NK, positions_T, kv_slots_T, *others, q_THD = arguments
    count = max(min(int(rows_1) - first_row, len(x_TK)), 0)
    matmul_prologue_reference(x_TK[:count], w_NK, positions_T[:count], kv_slots_T[:count], *others, q_THD[:count])


@pytest.mark.parametrize(("family", "kind"), [("qwen3", Residual), ("qwen3", TwoParts), ("exaone4", Residual)])
@pytest.mark.parametrize("first", [0, 1, 6, 8])
@pytest.mark.parametrize("count", [8, T])
def test_tokens_and_decode_rows_ahead(
    family: str, kind: type[Residual], first: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a stream that is normed, and of one that is read as it is."""
    monkeypatch.setattr(attention, "matmul_prologue", only_counted)
    decoder = make_decoder(checkpoint(family), layout="plain")
    layer, eps = decoder._layers[0].attention, decoder.config.rms_norm_eps
    weights, num_heads, head_dim = layer.weights, decoder.config.num_heads, decoder.config.head_dim
    stream = torch.randn(T, decoder.config.hidden_size)
    positions, kv_slots = torch.randint(0, 60, (T,)).int(), torch.randperm(3 * PAGE)[:T]
    inputs = cast(StepInputs, SimpleNamespace(positions_T=positions, kv_slots_XT=kv_slots[None], turned=None))
    kv = torch.full((2, 3, decoder.config.num_kv_heads, PAGE, head_dim), float("nan"))
    wanted_kv = kv.clone()
    residual = kind(
        stream.clone(), decoder.group, eps, deterministic=False, rows=torch.tensor([count], dtype=torch.int32)
    )
    qkv, q = layer._project_heads(residual, inputs, kv, first)

    norm_D = weights.input_norm_D
    read = stream if norm_D is None else rms_norm_reference(stream, norm_D, eps)
    rows = matmul_reference(read, weights.qkv_ND)[:count]
    assert len(qkv) == first
    torch.testing.assert_close(qkv, rows[:first], rtol=1e-5, atol=1e-5)
    norms = weights.q_norm_H, weights.k_norm_H, eps
    wanted_q = attention_prologue_reference(
        rows[first:], positions[first:count], kv_slots[first:count], layer.cos_sin_PR, *norms, *wanted_kv, num_heads
    )
    torch.testing.assert_close(q[: count - first], wanted_q, rtol=1e-5, atol=1e-5)
    assert len(q) == T - first
    torch.testing.assert_close(kv, wanted_kv, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("family", "deterministic", "wanted"),
    [
        ("qwen3", False, True),
        ("qwen3", True, False),
        ("qwen2", False, False),
        ("exaone4", False, True),
        ("ministral3", False, False),
        ("hunyuan", False, False),
    ],
)
def test_which_models(family: str, deterministic: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where a head's squares are summed in one order everywhere, with a bias, nor where queries grow or heads are
    normed when they have turned."""
    monkeypatch.setattr(attention, "can_fuse_prologue", lambda *sizes: True)
    layer = make_decoder(checkpoint(family), layout="plain", deterministic=deterministic)._layers[0].attention
    assert layer._ends_in_prologue(5000, torch.empty(2, 1, 1, 1, 1)) == wanted
