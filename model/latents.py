"""What attention makes of a step's tokens in a layer whose cache has latents.

Knows the order of the kernels; `Layer` knows the rest of a layer.

Shape suffixes: T tokens of the step (decode rows, then prefill tokens), N what the first product makes of one, Q what
queries are made from, H heads of this rank, D numbers that the cache holds of a token, L of its latent, V numbers of a
head's value, S slots, M pages of a slot, P positions, R numbers that turn.
"""

from torch import Tensor

from tercet.model.attention_plan import AttentionPlan, kind_of
from tercet.model.blocks import Latent
from tercet.model.head_products import queries_to_latents, values_of_latents
from tercet.model.linear import linear
from tercet.model.rank_weights import LatentWeights
from tercet.triton_kernels.attention_reference import Scoring
from tercet.triton_kernels.decode_work import DecodeWork
from tercet.triton_kernels.latent_attention import latent_decode_attention, latent_prefill_attention
from tercet.triton_kernels.latent_hopper import attend_in_room
from tercet.triton_kernels.latent_prologue import latent_prologue
from tercet.triton_kernels.latent_room import expand_latents
from tercet.triton_kernels.prefill_work import PrefillWork
from tercet.triton_kernels.prepare import StepInputs
from tercet.triton_kernels.scale_queries import scale_queries


def attend_to_latents(
    x_TN: Tensor, inputs: StepInputs, page_table_SM: Tensor, cache: Tensor, plan: AttentionPlan,
    *, latent: Latent, weights: LatentWeights, cos_sin_PR: Tensor, scale: float, query_scales_P: Tensor | None,
    deterministic: bool, last_queries: bool,
) -> Tensor:  # fmt: skip
    """[T, N] -> [T, H V]. `cache`: this layer's, [page, 1, token, dim], to which the tokens' latents go; `plan`,
    `last_queries`: see `Layer.attend`; `query_scales_P`: what queries are multiplied by at each position, if by
    anything."""
    rows = inputs.told_tokens_1
    kind = kind_of(0, Scoring(scale), cache)
    prefill = plan.last_queries if last_queries else plan.prefill.get(kind)
    assert not isinstance(prefill, PrefillWork)
    room = prefill.room if prefill else None
    by_latents = room.latent_rows_1 if room else rows
    q_TQ = latent_prologue(
        x_TN, inputs.positions_T, inputs.kv_slots_XT[0], cos_sin_PR, weights.latent_norm_L, weights.query_norm_Q,
        latent.eps, cache, in_pairs=latent.in_pairs, rows=rows,
    )  # fmt: skip
    if weights.query_XQ is not None:
        q_TQ = linear(q_TQ, weights.query_XQ, None, deterministic=deterministic, rows=rows)
    if query_scales_P is not None:
        scale_queries(q_TQ, q_TQ.shape[1], inputs.positions_T, query_scales_P, rows=rows)
    q_THD = queries_to_latents(
        q_TQ, weights.up_HXL, weights.num_still, inputs.positions_T, cos_sin_PR, in_pairs=latent.in_pairs, rows=rows,
        few=by_latents,
    )  # fmt: skip
    num_tokens, num_heads, _ = q_THD.shape
    num_decodes = len(inputs.decode_slots_B) * inputs.tries
    out_THL = q_THD.new_empty(num_tokens, num_heads, latent.rank)
    if num_decodes:
        work = plan.decode.get(kind)
        assert work is None or isinstance(work, DecodeWork)
        latent_decode_attention(
            q_THD[:num_decodes],
            cache,
            page_table_SM,
            inputs.decode_slots_B,
            inputs.decode_lengths_B,
            scale,
            latent.rank,
            work=work,
            tries=inputs.tries,
            lengths_T=inputs.lengths_T,
            out=out_THL[:num_decodes],
        )
    chunks = page_table_SM, inputs.chunk_slots_C, inputs.chunk_starts_C
    if num_decodes < num_tokens:
        latent_prefill_attention(
            q_THD[num_decodes:],
            cache,
            *chunks,
            inputs.query_starts_C1,
            scale,
            latent.rank,
            work=prefill.by_latents if prefill else None,
            out=out_THL[num_decodes:],
        )
    out_THV = values_of_latents(out_THL, weights.up_HXL, weights.num_still, by_latents)
    if prefill and room and prefill.in_room:
        assert isinstance(weights.up_HXL, Tensor)
        expand_latents(cache, weights.up_HXL, *chunks, inputs.query_starts_C1, room)
        attend_in_room(
            q_TQ[num_decodes:],
            q_THD[num_decodes:],
            cache,
            page_table_SM,
            scale,
            weights.num_still,
            prefill.in_room,
            room,
            out_THV[num_decodes:],
        )
    return out_THV.flatten(1)
