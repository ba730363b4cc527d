"""On a GPU: the head in FP8 that guesses are drawn by, of the sizes of real models and by all numbers of slots."""

from pathlib import Path

import pytest
import torch

from foreseen_steps import foreseeing_decoder, share_of_right
from scaled_weights import unrounded
from tercet.model.guess_head import in_fp8
from tercet.model.head import Head
from tercet.model.parallel import Group
from tercet.triton_kernels.sample import sample
from test_engine_gpu import REAL_HEADS
from test_model_guess_head import check_nearest
from test_triton_kernels_matmul import distance, exact
from test_triton_kernels_matmul_sample import EPS, assert_same, copy_of, mixed_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a GPU that knows FP8",
    ),
]

GPU = torch.device("cuda", 0)
OF_DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("vocab", "D"), [(248_320, 4096), (151_936, 1024), (129_283, 7168)])
def test_what_it_says(vocab: int, D: int, deterministic: bool) -> None:
    """As it is made there; the tokens are those that are drawn from logits in memory."""
    w_VD = torch.randn(vocab, D, device=GPU).mul_(2 * D**-0.5).bfloat16()
    w_VD[-7:] = 0.0
    w_NK, norm_D = in_fp8(w_VD), torch.rand(D, device=GPU).add_(0.5).bfloat16()
    assert not w_NK.numbers_NJ.view(torch.uint8).bitwise_and(0x7F).eq(0x7F).any()  # no number is none
    some = slice(vocab - 3000, vocab)
    check_nearest(w_NK[some], w_VD[some])
    head = Head(norm_D, w_NK, EPS, vocab, 0.0, Group.single(GPU), deterministic)
    for rows in range(1, 18):
        hidden_RD = torch.randn(rows, D, device=GPU).bfloat16()
        slots_R, positions_R, table = mixed_rows(rows, vocab, "cuda")
        logits_RV = head.logits(hidden_RD)
        assert distance(logits_RV[:, some], exact(hidden_RD, unrounded(w_NK[some]), norm=norm_D)) < 1.2e-2
        assert (logits_RV[:, -7:] == 0).all()
        apart, together = copy_of(table), copy_of(table)
        wanted_R = sample(logits_RV, slots_R, positions_R, apart)
        assert head.sample(hidden_RD, slots_R, positions_R, together).tolist() == wanted_R.tolist()
        assert_same(together, apart)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("family", "overrides"), [("glm4-moe", REAL_HEADS), ("qwen3.5", REAL_HEADS | OF_DELTA)])
def test_guesses_that_are_drawn_by_it_are_nearly_as_good(
    family: str, overrides: dict[str, int], deterministic: bool, tmp_path: Path
) -> None:
    decoder = foreseeing_decoder(
        family, tmp_path, GPU, torch.bfloat16, 1, deterministic=deterministic, **overrides, max_position_embeddings=1024
    )
    assert share_of_right(decoder, 60) >= 0.8
