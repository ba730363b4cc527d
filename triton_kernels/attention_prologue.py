"""From a layer's fused q, k, v rows to queries and a filled cache: head norms, rotary, and the write of K and V.

Shape suffixes: T tokens, N = q heads + 2 kv heads times head size, H q heads, D head size, P positions, R rotary
dimension; caches are of one layer, [page, kv head, token of the page, D].
"""

import torch
from torch import Tensor

from tercet.triton_kernels.add_rms_norm import rms_norm
from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_device, check_dtype, check_same, check_shape
from tercet.triton_kernels.rotary import rotary
from tercet.triton_kernels.write_kv import write_kv


def attention_prologue(
    qkv_TN: Tensor,
    positions_T: Tensor,
    kv_slots_T: Tensor,
    cos_sin_PR: Tensor,
    q_norm_weight_D: Tensor | None,
    k_norm_weight_D: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    num_q_heads: int,
) -> Tensor:
    """[T, (H + 2 kv heads) D] -> q [T, H, D], normed and turned; K and V go into the caches at `kv_slots_T`.

    May use `qkv_TN` as scratch. fp32 inside.
    """
    num_kv_heads, _, head_dim = k_cache.shape[1:]
    T = qkv_TN.shape[0]
    check_dtype("qkv", qkv_TN, *FLOATS)
    check_contiguous("qkv", qkv_TN)
    check_shape("qkv", qkv_TN, None, (num_q_heads + 2 * num_kv_heads) * head_dim)
    check_same("k_cache", k_cache, qkv_TN)
    check_shape("positions", positions_T, T)
    check_device("positions", positions_T, qkv_TN)
    if (q_norm_weight_D is None) != (k_norm_weight_D is None):
        raise ValueError("q_norm_weight and k_norm_weight: got one, wanted both or neither")
    heads_THD = qkv_TN.view(T, num_q_heads + 2 * num_kv_heads, head_dim)
    q_THD, k_THD, v_THD = torch.split(heads_THD, [num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm_weight_D is not None and k_norm_weight_D is not None:
        q_THD = rms_norm(q_THD.contiguous(), q_norm_weight_D, eps)
        k_THD = rms_norm(k_THD.contiguous(), k_norm_weight_D, eps)
        rotary(q_THD, k_THD, positions_T, cos_sin_PR)
    else:
        # Without norms q and k are still side by side and turn as one.
        rotary(heads_THD[:, : num_q_heads + num_kv_heads], heads_THD[:, :0], positions_T, cos_sin_PR)
        q_THD = q_THD.contiguous()
    write_kv(k_THD, v_THD, k_cache, v_cache, kv_slots_T)
    return q_THD
