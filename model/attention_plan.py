"""How the attention of one step is divided among a GPU's programs: once per step, on the device, for all layers.

Knows which kernel will serve which layers; the kernels know the rest.

Shape suffixes: S slots, M pages of a slot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tercet.model.blocks import Latent
from tercet.triton_kernels.attention import most_deep, plan_last_queries, plan_prefill
from tercet.triton_kernels.attention_reference import Scoring
from tercet.triton_kernels.decode_work import DecodeWork, make_decode_work, plan_decode_work
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.few_rows import FewRows
from tercet.triton_kernels.fused_decode import FusedPlan, can_fuse_decode, plan_fused_decode
from tercet.triton_kernels.latent_attention import LatentPrefill, plan_latent_chunks, plan_latent_decode
from tercet.triton_kernels.latent_room import room_for
from tercet.triton_kernels.prefill_work import PrefillWork
from tercet.triton_kernels.prepare import StepInputs


class Kind(NamedTuple):
    """What layers that share a plan have in common."""

    table: int
    """Which of the page tables is theirs."""
    window: int
    num_kv_heads: int
    head_dim: int
    borrowed: bool = False
    """They have queries alone: keys and values are those of other layers, whose tokens are all in the cache."""

    def is_like(self, other: "Kind") -> bool:
        """But for whose keys and values they attend to, and where those are."""
        own, others = (one._replace(table=0, borrowed=False) for one in (self, other))
        return own == others


class Attending(NamedTuple):
    """A layer that attends, as far as plans mind."""

    scoring: Scoring
    k_cache: Tensor
    """[page, kv head, token, dim]; or latents."""
    rotary_dim: int
    table: int
    borrowed: bool = False

    @property
    def kind(self) -> Kind:
        return kind_of(self.table, self.scoring, self.k_cache, borrowed=self.borrowed)


def kind_of(table: int, scoring: Scoring, k_cache: Tensor, *, borrowed: bool = False) -> Kind:
    return Kind(table, scoring.window, k_cache.shape[1], k_cache.shape[3], borrowed)


@dataclass(frozen=True)
class AttentionPlan:
    """What all layers of a kind share; nothing where the references compute."""

    decode: dict[Kind, DecodeWork | FusedPlan]
    """All but work is for the kernels that take q, k, v rows as they are."""
    prefill: dict[Kind, PrefillWork | LatentPrefill]
    last_queries: PrefillWork | LatentPrefill | None
    """For the last layer: of chunks that are not `deep` no more than what their last tokens need."""

    @classmethod
    def of_step(
        cls, inputs: StepInputs, attending: Sequence[Attending], page_table_SM: Tensor, *, num_heads: int,
        deterministic: bool, longest: int, deep: int, fuses: bool = True, latent: Latent | None = None,
    ) -> "AttentionPlan":  # fmt: skip
        """`attending`: the layers that do, of which those of one window and one size score alike; `num_heads`: q heads
        of this rank; `longest`, `deep`: see `Decoder.forward`; without `fuses` what comes before attention is apart;
        `latent`: what the cache holds in place of keys and values. Graph-safe."""
        num_rows, tries = inputs.decode_slots_B.shape[0], inputs.tries
        num_tokens = inputs.positions_T.shape[0] - num_rows * tries
        decode: dict[Kind, DecodeWork | FusedPlan] = {}
        prefill: dict[Kind, PrefillWork | LatentPrefill] = {}
        last_queries = None
        last_layer = attending[-1]
        if not use_kernels(last_layer.k_cache):
            return cls(decode, prefill, None)
        if latent is not None:
            return cls._of_latents(inputs, last_layer, page_table_SM, num_heads, latent, num_tokens, deterministic)
        kinds = {layer.kind: layer for layer in attending}
        if num_rows:
            rows, page_tables = (inputs.decode_lengths_B, inputs.decode_slots_B), inputs.page_tables(page_table_SM)
            for kind, (scoring, k_cache, rotary_dim, *_) in kinds.items():
                own = page_tables[kind.table]
                if (shared := _without_pages(decode, kind)) is not None:
                    decode[kind] = shared
                elif (
                    fuses
                    and not kind.borrowed
                    and can_fuse_decode(
                        k_cache, num_heads, rotary_dim, scoring, tries=tries, num_rows=num_rows, longest=longest
                    )
                ):
                    decode[kind] = plan_fused_decode(
                        *rows, own, num_heads, k_cache, window=kind.window, deterministic=deterministic,
                        longest=longest, tries=tries, lengths_T=inputs.lengths_T,
                    )  # fmt: skip
                else:
                    decode[kind] = _split(
                        *rows, own, num_heads, k_cache, deterministic, kind.window, tries, inputs.lengths_T
                    )  # fmt: skip
        if num_tokens:
            chunks = inputs.chunk_slots_C, inputs.chunk_starts_C, inputs.query_starts_C1
            for kind, (scoring, k_cache, *_) in kinds.items():
                like = next((one for one in prefill if one.is_like(kind)), None)  # no plan has pages in it
                prefill[kind] = prefill[like] if like else plan_prefill(
                    *chunks, num_tokens, num_heads, k_cache, scoring, deep=deep, ends_T=inputs.ends_for(kind.window)
                )  # fmt: skip
            # Few tokens are attended to in parts sooner than some of them whole.
            last = prefill[last_layer.kind]
            assert isinstance(last, PrefillWork)
            last_queries = plan_last_queries(*chunks, last) if last.parts is None else last
        return cls(decode, prefill, last_queries)

    @classmethod
    def _of_latents(
        cls, inputs: StepInputs, layer: Attending, page_table_SM: Tensor, num_heads: int, latent: Latent,
        num_tokens: int, deterministic: bool,
    ) -> "AttentionPlan":  # fmt: skip
        """For `num_tokens` of chunks and all decode rows. All layers are alike and see all."""
        decode: dict[Kind, DecodeWork | FusedPlan] = {}
        kind, cache = layer.kind, layer.k_cache
        if len(inputs.decode_slots_B):
            rows = inputs.decode_lengths_B, inputs.decode_slots_B, page_table_SM
            decode[kind] = plan_latent_decode(
                *rows, cache, num_heads, latent.rank, deterministic=deterministic, tries=inputs.tries,
                lengths_T=inputs.lengths_T,
            )  # fmt: skip
        if not num_tokens:
            return cls(decode, {}, None)
        chunks = inputs.chunk_slots_C, inputs.chunk_starts_C, inputs.query_starts_C1, inputs.num_tokens_1
        room = None
        if not deterministic:  # whether there is room depends on the step
            longest = page_table_SM.shape[1] * cache.shape[2]
            sizes = latent.still, latent.turned, latent.value
            room = room_for(num_tokens, len(inputs.chunk_slots_C), longest, num_heads, *sizes, cache)
        num_decodes = len(inputs.decode_slots_B) * inputs.tries
        whole, last = plan_latent_chunks(*chunks, num_decodes, num_tokens, num_heads, room)
        return cls(decode, {kind: whole}, last)


def minds_length(attending: Sequence[Attending], *, num_heads: int, deterministic: bool, tries: int) -> bool:
    """Whether a plan makes something of `longest`, for rows of `tries` tokens."""
    fused = (
        can_fuse_decode(layer.k_cache, num_heads, layer.rotary_dim, layer.scoring, tries=tries)
        for layer in attending
        if not layer.borrowed
    )
    return not deterministic and any(fused)


def depths(attending: Sequence[Attending], *, num_heads: int, deterministic: bool) -> dict[int, int]:
    """By the values of `deep` that make a difference, up to how many prefill tokens a plan makes something of them."""
    far = next((layer for layer in attending if not layer.scoring.window), None)
    return {} if deterministic or far is None else most_deep(num_heads, far.k_cache, far.scoring)


def _without_pages(plans: Mapping[Kind, DecodeWork | FusedPlan], kind: Kind) -> DecodeWork | FusedPlan | None:
    """The plan of layers that are of this kind otherwise, if there is one that names no pages and makes no keys."""
    alike = (plan for one, plan in plans.items() if one.is_like(kind) and not isinstance(plan, FewRows))
    return next((plan for plan in alike if isinstance(plan, DecodeWork) or not kind.borrowed), None)


def _split(
    decode_lengths_B: Tensor, decode_slots_B: Tensor, page_table_SM: Tensor, num_heads: int, k_cache: Tensor,
    deterministic: bool, window: int, tries: int, lengths_T: Tensor | None,
) -> DecodeWork:  # fmt: skip
    num_rows = decode_slots_B.shape[0]
    num_kv_heads, page_size, head_dim = k_cache.shape[1:]
    # Not the cache's pages: with shared prefixes the rows can be longer, all together, than the cache.
    num_pages = num_rows * page_table_SM.shape[1]
    sizes = num_rows, num_pages, page_size, num_heads, num_kv_heads, head_dim
    work = make_decode_work(
        *sizes, k_cache.device, deterministic=deterministic, window=window, tries=tries, lengths_T=lengths_T
    )  # fmt: skip
    plan_decode_work(decode_lengths_B, decode_slots_B, work, num_kv_heads)
    return work
