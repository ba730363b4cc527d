"""The end of a decode step on the GPU, product and draw: by a configuration in one, or apart with logits in memory.

Knows the candidates' vocabulary and the launch; measures nothing itself. The norm before it is left out.
"""

import torch
from torch import Tensor

from kernel_timing import Stopwatch
from matmul_products import Product
from tercet.model.slots import make_slot_table
from tercet.triton_kernels.matmul import matmul
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.matmul_sample import draw_into
from tercet.triton_kernels.sample import TokenRing
from tercet.triton_kernels.sample_shard import VocabShard, sample_shard_into
from tercet.triton_kernels.slot_table import SlotTable

_DEPTH = 2


class DrawCase:
    """Rows that are all drawn, at temperature 1: what a step may have to do at most."""

    def __init__(self, stopwatch: Stopwatch, product: Product, num_rows: int) -> None:
        self.product = product
        self.weights = stopwatch.rotation(product.N, product.K)
        self.x = stopwatch.cut(1 << 30, num_rows, product.K) * (3 * product.K**-0.5)
        places = torch.zeros(_DEPTH, num_rows, dtype=torch.int32, pin_memory=True)
        self._ring = TokenRing(places, torch.zeros(1, dtype=torch.int32, device="cuda"))
        self._rows = _rows(product, num_rows, self.x.device)

    def run(self, config: MatmulConfig, index: int) -> None:
        draw_into(config, self._ring, self.x, self.weights[index], *self._rows)

    def peer(self, index: int) -> None:
        """The product as the engine chooses it, and the draw from its logits."""
        sample_shard_into(self._ring, matmul(self.x, self.weights[index]), *self._rows)

    def error(self, config: MatmulConfig) -> float:
        """The share of rows whose token is not the one that is drawn from logits in memory."""
        self.peer(1)
        wanted = self._drawn()
        self.run(config, 1)
        return float((self._drawn() != wanted).float().mean())

    def _drawn(self) -> Tensor:
        torch.cuda.synchronize()
        return self._ring.places_KR[int(self._ring.turn_1)].clone()


def compile_draw(product: Product, num_rows: int, config: MatmulConfig) -> None:
    """Launch on tensors that have no memory."""
    meta = torch.device("meta")
    x, w = (torch.empty(n, product.K, dtype=torch.bfloat16, device=meta) for n in (num_rows, product.N))
    places, turn = (torch.empty(*shape, dtype=torch.int32, device=meta) for shape in ((_DEPTH, num_rows), (1,)))
    draw_into(config, TokenRing(places, turn), x, w, *_rows(product, num_rows, meta))


def _rows(product: Product, num_rows: int, device: torch.device) -> tuple[Tensor, Tensor, SlotTable, VocabShard]:
    """Slots and positions, the table and whose columns these are."""
    slots = torch.arange(num_rows, dtype=torch.int32, device=device)
    table = make_slot_table(num_rows, 256, 64, device)
    table.temperature_S.fill_(1.0)
    return slots, torch.full_like(slots, 100), table, VocabShard(0, product.N, None)
