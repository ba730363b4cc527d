"""The end of a model on one rank: the final norm, what makes logits of hidden states, and the draw behind it.

Knows nothing of layers, and of a request no more than its sampling parameters in the slot table.

Shape suffixes: R rows that sample, D hidden size, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tercet.model.linear import rms_norm_linear
from tercet.model.parallel import Group
from tercet.triton_kernels.add_rms_norm import rms_norm
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.matmul_sample import rms_norm_matmul_sample
from tercet.triton_kernels.sample import TokenRing
from tercet.triton_kernels.sample_shard import VocabShard, sample_shard, sample_shard_into
from tercet.triton_kernels.scaled_weight import ScaledWeight, Weight
from tercet.triton_kernels.slot_table import SlotTable
from tercet.triton_kernels.soft_cap import soft_cap


@dataclass(frozen=True)
class Head:
    """Of one rank, which has some of the vocabulary."""

    norm_D: Tensor
    lm_head_VD: Weight
    eps: float
    vocab_size: int
    """Of all ranks."""
    softcap: float
    group: Group
    deterministic: bool

    @torch.inference_mode()
    def normed(self, hidden_RD: Tensor) -> Tensor:
        """The rows behind the final norm, in memory: what an embedding is made of."""
        return rms_norm(hidden_RD, self.norm_D, self.eps, deterministic=self.deterministic)

    @torch.inference_mode()
    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Logits over the whole vocabulary, the same on every rank: [R, D] -> [R, V]."""
        return self.group.all_gather(self._logits_shard(hidden_RD), self.vocab_size)

    @property
    def _vocab_shard(self) -> VocabShard:
        """Where this rank's columns of the logits lie."""
        first = self.group.rank * self.lm_head_VD.shape[0]
        return VocabShard(first, self.vocab_size, self.group.stack if self.group.size > 1 else None)

    def _logits_shard(self, hidden_RD: Tensor) -> Tensor:
        """This rank's columns of the logits, the zeros of vocabulary padding included."""
        logits_RV = rms_norm_linear(
            hidden_RD, self.norm_D, self.eps, self.lm_head_VD, None, deterministic=self.deterministic
        )
        return soft_cap(logits_RV, self.softcap) if self.softcap else logits_RV

    @torch.inference_mode()
    def sample(self, hidden_RD: Tensor, slots_R: Tensor, positions_R: Tensor, table: SlotTable) -> Tensor:
        """The token of each row, for rows that allow everything: as `sample_shard` says of their logits."""
        if not use_kernels(hidden_RD):
            return sample_shard(self._logits_shard(hidden_RD), slots_R, positions_R, table, self._vocab_shard)
        places_1R = torch.empty(1, len(slots_R), dtype=torch.int32, device=slots_R.device)
        turn_1 = torch.zeros(1, dtype=torch.int32, device=slots_R.device)
        self.sample_into(TokenRing(places_1R, turn_1), hidden_RD, slots_R, positions_R, table)
        return places_1R[0]

    @torch.inference_mode()
    def sample_into(
        self, ring: TokenRing, hidden_RD: Tensor, slots_R: Tensor, positions_R: Tensor, table: SlotTable
    ) -> None:
        """The same with kernels only, and no logits in memory unless they have a cap, or the product's weights scales:
        into the next place of the ring. Graph-safe."""
        if self.softcap or isinstance(self.lm_head_VD, ScaledWeight):
            sample_shard_into(ring, self._logits_shard(hidden_RD), slots_R, positions_R, table, self._vocab_shard)
            return
        rms_norm_matmul_sample(
            ring,
            hidden_RD,
            self.norm_D,
            self.eps,
            self.lm_head_VD,
            slots_R,
            positions_R,
            table,
            self._vocab_shard,
            deterministic=self.deterministic,
        )
