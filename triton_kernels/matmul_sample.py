"""From hidden states to tokens without logits in memory: norm, product and draw, for rows that allow everything.

The product's kernel ends with each tile's best score (`matmul_draw.py`), `sample_shard.py` takes the best of those. The
tokens are to the bit those of `sample` over the product's logits: which of the two a step takes, a request's
neighbours decide.

Shape suffixes: R rows of a step, D hidden size, V columns of this rank, P tiles of them.
"""

import torch
from torch import Tensor

from tercet.triton_kernels.add_rms_norm import rms_norm
from tercet.triton_kernels.checks import check_same, check_shape
from tercet.triton_kernels.matmul import norming_config, rms_norm_matmul
from tercet.triton_kernels.matmul_config import NEED_TMA, MatmulConfig
from tercet.triton_kernels.matmul_draw import Draw
from tercet.triton_kernels.matmul_launch import can_use_tma, launch_matmul, num_tiles
from tercet.triton_kernels.sample import GREEDY_BELOW, TokenRing, check_rows
from tercet.triton_kernels.sample_shard import VocabShard, append_best, sample_shard_into
from tercet.triton_kernels.slot_table import SlotTable
from tercet.triton_kernels.tuning import choose_matmul_sample


def rms_norm_matmul_sample(
    ring: TokenRing, hidden_RD: Tensor, norm_D: Tensor, eps: float, w_VD: Tensor, slots_R: Tensor,
    positions_R: Tensor, table: SlotTable, shard: VocabShard, *, deterministic: bool = False,
) -> None:  # fmt: skip
    """`sample_shard_into` of the logits of `rms_norm_matmul`, by kernels only. Mutates ring and table; graph-safe."""
    check_shape("hidden", hidden_RD, None, None)
    check_same("hidden", hidden_RD, hidden_RD)
    check_rows(hidden_RD, slots_R, positions_R, table)
    check_shape("w", w_VD, None, hidden_RD.shape[1])
    check_same("w", w_VD, hidden_RD)
    if not hidden_RD.shape[0]:
        return
    V, D = w_VD.shape
    config = choose_matmul_sample(hidden_RD.shape[0], V, D, w_VD.dtype, deterministic, w_VD.device)
    norming = norming_config("rms_norm_matmul", hidden_RD, norm_D, w_VD, deterministic)
    if config.kernel == "apart" or (norming is not None and norming.kernel == "early"):  # which cannot draw
        logits_RV = rms_norm_matmul(hidden_RD, norm_D, eps, w_VD, deterministic=deterministic)
        sample_shard_into(ring, logits_RV, slots_R, positions_R, table, shard)
        return
    if norming is not None:
        draw_into(norming, ring, hidden_RD, w_VD, slots_R, positions_R, table, shard, norm_D, eps)
        return
    normed_RD = rms_norm(hidden_RD, norm_D, eps, deterministic=deterministic)
    if config.kernel in NEED_TMA and not can_use_tma(normed_RD, w_VD):
        config = MatmulConfig("tile", 128, 128, 32 if w_VD.dtype == torch.float32 else 64, num_warps=8)
    draw_into(config, ring, normed_RD, w_VD, slots_R, positions_R, table, shard)


def draw_into(
    config: MatmulConfig, ring: TokenRing, x_RD: Tensor, w_VD: Tensor, slots_R: Tensor, positions_R: Tensor,
    table: SlotTable, shard: VocabShard, norm_D: Tensor | None = None, eps: float = 0.0,
) -> None:  # fmt: skip
    """The product and the draw in one, by this configuration. With `norm_D` the kernel norms the rows of x itself."""
    R, V, P = x_RD.shape[0], w_VD.shape[0], num_tiles(config, w_VD.shape[0])
    scores_RP = torch.empty(R, P, dtype=torch.float32, device=x_RD.device)
    ids_RP = torch.empty(R, P, dtype=torch.int32, device=x_RD.device)
    draw = Draw(
        slots_R, positions_R, table.temperature_S, table.seed_S, table.min_length_S, table.stop_ids_SE, scores_RP,
        ids_RP, ring.turn_1, P, table.length_S.shape[0], ring.places_KR.shape[0], shard.first, shard.end(V),
        GREEDY_BELOW,
    )  # fmt: skip
    launch_matmul(config, x_RD, w_VD, None, "sample", None, norm_D, eps, draw=draw)
    append_best(ring, scores_RP, ids_RP, slots_R, positions_R, table, shard)
