"""The head that guesses are drawn by: numbers in FP8 by float64, who has one, and what it says, of one rank and of
several, by products with the numbers that it stands for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foreseen_steps import foreseeing_decoder, share_of_right
from guessing_layers import guessing_checkpoint
from interpreted import rerun_interpreted
from scaled_weights import unrounded
from tercet.model import guess_head
from tercet.model.blocks import Guesser
from tercet.model.checkpoint import read_config
from tercet.model.compile_ahead import _AbsentRanks
from tercet.model.config import ModelConfig
from tercet.model.guess_head import LEAST_NUMBERS, in_fp8, with_guess_head
from tercet.model.head import Head
from tercet.model.parallel import Group
from tercet.model.rank_weights import GuesserWeights
from tercet.model.rope import Rope
from tercet.model.weights import empty_weights
from tercet.triton_kernels.checks import FP8, FP8_MOST
from tercet.triton_kernels.dispatch import INTERPRETED, Gpu, pretending
from tercet.triton_kernels.sample import TokenRing, sample
from tercet.triton_kernels.scaled_weight import ScaledWeight
from tercet.triton_kernels.slot_table import SlotTable
from test_triton_kernels_matmul import distance, exact
from test_triton_kernels_matmul_sample import EPS, assert_same, copy_of, mixed_rows

CPU, META = torch.device("cpu"), torch.device("meta")
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
"""The interpreter multiplies no bfloat16."""
TINY = torch.finfo(torch.float32).tiny


def check_nearest(head: ScaledWeight, w_VD: Tensor) -> None:
    """Its numbers are off by half a unit of their last digit at most, and zeros are zeros."""
    assert (head.shape, head.dtype, head.group) == (w_VD.shape, w_VD.dtype, w_VD.shape[1])
    assert head.numbers_NJ.dtype == FP8
    scales_V1, wide_VD, got_VD = head.scales_GN.double().T, w_VD.double(), unrounded(head)
    assert torch.allclose(scales_V1[:, 0], (wide_VD.abs().amax(1) / FP8_MOST).clamp(min=TINY), rtol=1e-6, atol=0)
    units_VD = torch.exp2((wide_VD / scales_V1).abs().clamp(min=2.0**-6).log2().floor() - 3)
    assert ((got_VD - wide_VD).abs() <= units_VD * scales_V1 * (0.5 + 1e-5)).all()
    assert (got_VD[wide_VD == 0] == 0).all()


def test_numbers_are_the_nearest_of_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the rounds; rows of zeros stay zeros."""
    V, D = 150, 192
    for at_once, dtype in ((40 * D, torch.bfloat16), (2**24, torch.bfloat16), (1, torch.float16)):
        monkeypatch.setattr(guess_head, "_AT_ONCE", at_once)
        w_VD = torch.randn(V, D).mul_(0.02)
        w_VD[1] *= (
            torch.randn(D).mul_(3).exp_()
        )  # from some that are largest by far to those that FP8 has no digits for
        w_VD[2, 5] = 100.0
        w_VD[3] *= 1e-5
        w_VD[4], w_VD[5] = 0.25, -3.0
        w_VD[6] *= 1e-37
        w_VD[[0, 7, *range(140, V)]] = 0.0
        w_VD = w_VD.to(dtype)
        head = in_fp8(w_VD)
        assert head.numbers_NJ.is_contiguous()
        assert head.scales_GN.is_contiguous()
        check_nearest(head, w_VD)
        wide_VD, got_VD = w_VD.double(), unrounded(head)
        assert (got_VD[4:6] - wide_VD[4:6]).abs().max() < 1e-6  # the largest of FP8, all of them
        assert distance(got_VD[8:140], wide_VD[8:140]) < 0.03


def one_layer(vocab_size: int, hidden_size: int, *, guesses: bool = True) -> ModelConfig:
    names = {"token_norm": "mtp.t", "hidden_norm": "mtp.h", "join": "mtp.fc", "norm": "mtp.norm"}
    guesser = Guesser(layer="mtp.layers.0.", **names, has_experts=False, goes_on_normed=True)
    return ModelConfig(
        family="qwen3", vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=128, num_layers=1,
        num_heads=2, num_kv_heads=2, head_dim=64, rms_norm_eps=1e-6, rope=Rope(theta=1e6), max_position_embeddings=64,
        guesser=guesser, guesses=guesses,
    )  # fmt: skip


def guesser_of(config: ModelConfig, capability: int = 90, size: int = 1, **changes: Any) -> GuesserWeights | None:
    """On the last rank, on a GPU that is not here."""
    where: dict[str, Any] = {"rank": size - 1, "size": size, "dtype": torch.bfloat16, "device": META, **changes}
    with pretending(Gpu("", capability, 132)):
        return with_guess_head(empty_weights(config, kept={}, interleaved=True, **where)).guesser


def test_who_has_one() -> None:
    """Models in 16 bits with a large head, on cards that know FP8; of several ranks each has its rows, and padding."""
    large = one_layer(248_321, 4096)
    for capability in (89, 90, 120):
        guesser = guesser_of(large, capability, 2)
        assert guesser is not None
        assert guesser.head_VD is not None
        assert guesser.head_VD.shape == (large.vocab_per_rank(2), 4096)
        assert guesser.head_VD.nbytes < 0.51 * 2 * guesser.head_VD.shape.numel()
    own: list[GuesserWeights | None] = [
        guesser_of(large, 86),
        guesser_of(large, dtype=torch.float32),
        guesser_of(one_layer(LEAST_NUMBERS // 1024 - 8, 1024)),
        guesser_of(one_layer(LEAST_NUMBERS // 1024, 1024), size=2),
        guesser_of(one_layer(10**6, 4096 + 32)),
    ]
    assert all(guesser is not None and guesser.head_VD is None for guesser in own)
    assert guesser_of(one_layer(248_321, 4096, guesses=False)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_cpu_there_is_one_in_the_interpreter_alone(dtype: torch.dtype, tmp_path: Path) -> None:
    config = replace(read_config(guessing_checkpoint("qwen3.5", tmp_path)), guesses=True)
    weights = empty_weights(config, rank=0, size=1, dtype=dtype, device=CPU, kept={}, interleaved=False)
    weights.lm_head_VD.normal_()
    guesser = with_guess_head(weights, least=1).guesser
    assert guesser is not None
    assert (guesser.head_VD is not None) == (INTERPRETED and dtype == torch.bfloat16)


def all_with_slots(rows: int, vocab: int) -> tuple[Tensor, Tensor, SlotTable]:
    """References know no rows without."""
    slots_R, positions_R, table = mixed_rows(rows, vocab)
    slots_R[slots_R > rows] = rows
    return slots_R, positions_R, table


class Ranks(_AbsentRanks):
    """One of two, which hears of the other what that has said in a round before."""

    said: tuple[dict[int, Tensor], ...] = ({}, {})

    def stack(self, x: Tensor) -> Tensor:
        self.said[self.rank][x.ndim] = x.clone()
        return torch.stack([of_rank.get(x.ndim, x) for of_rank in self.said])


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_what_it_says(softcap: float) -> None:
    """Logits near float64's; tokens of rows that allow everything are those that are drawn from these."""
    vocab, D, dtype = 203, 128, DTYPE
    w_VD, norm_D = (torch.randn(vocab, D) * 2 * D**-0.5).to(dtype), torch.rand(D).add_(0.5).to(dtype)
    w_VD[9] = 0.0
    for rows, deterministic in ((1, False), (1, True), (7, False), (16, True)):
        hidden_RD, (slots_R, positions_R, table) = torch.randn(rows, D).to(dtype), all_with_slots(rows, vocab)
        head = Head(norm_D, in_fp8(w_VD), EPS, vocab, softcap, Group.single(CPU), deterministic)
        logits_RV = head.logits(hidden_RD)
        wanted_RV = exact(hidden_RD, unrounded(in_fp8(w_VD)), norm=norm_D)
        assert distance(logits_RV, softcap * torch.tanh(wanted_RV / softcap) if softcap else wanted_RV) < 1.2e-2
        assert (logits_RV[:, 9] == 0).all()
        apart, together = copy_of(table), copy_of(table)
        wanted_R = sample(logits_RV, slots_R, positions_R, apart)
        assert head.sample(hidden_RD, slots_R, positions_R, together).tolist() == wanted_R.tolist()
        assert_same(together, apart)


def test_of_several_ranks_all_say_what_one_does() -> None:
    """The last one's rows are padding, in part; what that says is never a token."""
    vocab, D, dtype = 203, 128, DTYPE
    w_VD, norm_D = torch.zeros(2 * 128, D, dtype=dtype), torch.ones(D, dtype=dtype)
    w_VD[:vocab] = torch.randn(vocab, D) - 0.1
    hidden_RD, (slots_R, positions_R, table) = torch.randn(12, D).to(dtype), all_with_slots(12, vocab)
    hidden_RD[5] = 0.5  # of which nearly all logits are below those of padding
    alone = Head(norm_D, in_fp8(w_VD[:vocab]), EPS, vocab, 0.0, Group.single(CPU), False)
    wanted = alone.sample(hidden_RD, slots_R, positions_R, copy_of(table))
    heads = [
        Head(norm_D, in_fp8(part_VD.contiguous()), EPS, vocab, 0.0, Ranks(rank, 2, CPU), False)
        for rank, part_VD in enumerate(w_VD.split(128))
    ]
    assert (heads[1]._logits_shard(hidden_RD)[:, vocab - 128 :] == 0).all()
    for turn in range(2):
        for head in heads:
            got = head.sample(hidden_RD, slots_R, positions_R, copy_of(table))
            assert not turn or got.tolist() == wanted.tolist()


@pytest.mark.skipif(not INTERPRETED, reason="on a CPU nothing is drawn into a ring")
def test_it_draws_into_the_next_place_of_a_ring() -> None:
    vocab, D = 203, 64
    w_VD, norm_D = torch.randn(vocab, D).to(DTYPE), torch.ones(D, dtype=DTYPE)
    hidden_RD, (slots_R, positions_R, table) = torch.randn(4, D).to(DTYPE), all_with_slots(4, vocab)
    head = Head(norm_D, in_fp8(w_VD), EPS, vocab, 0.0, Group.single(CPU), False)
    ring = TokenRing(torch.full((2, 4), -9, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    head.sample_into(ring, hidden_RD, slots_R, positions_R, copy_of(table))
    wanted = sample(head.logits(hidden_RD), slots_R, positions_R, copy_of(table))
    assert ring.places_KR.tolist() == [[-9] * 4, wanted.tolist()]


@pytest.mark.skipif(not INTERPRETED, reason="on a CPU none is rounded")
@pytest.mark.long
@pytest.mark.parametrize("deterministic", [False, True])
def test_guesses_that_are_drawn_by_it_are_nearly_as_good(deterministic: bool, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    sizes = {"num_hidden_layers": 2}
    decoder = foreseeing_decoder("glm4-moe", tmp_path, CPU, DTYPE, 1, deterministic=deterministic, **sizes)
    assert share_of_right(decoder, 2) >= 0.7


def test_interpreted() -> None:
    rerun_interpreted(__file__)
