"""The products of a model's step, and the table that says how each runs, with configurations that are tried.

Knows which lines of the table a step asks; measures nothing.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from matmul_products import Product
from tercet.model.config import ModelConfig
from tercet.triton_kernels import tuning
from tercet.triton_kernels.dispatch import gpu_name
from tercet.triton_kernels.tuning import MatmulConfig, load_table, table_key

_ADDING = ("o", "down")
"""What they make is added to the residual: by the product itself where there is one rank, else behind the sum."""


@dataclass(frozen=True)
class Choice:
    """A product of a rank's step, and the line of the table that is asked for it there."""

    product: Product
    asked_op: str
    """What runs: another than the product's own where one GPU plays one of several ranks, and has nothing to sum."""

    @property
    def line(self) -> str:
        return self._line(self.product.op)

    @property
    def asked(self) -> str:
        return self._line(self.asked_op)

    @property
    def divided(self) -> bool:
        """Whether what comes next adds up parts of it."""
        return self.product.name in _ADDING

    def _line(self, op: str) -> str:
        return table_key(op, self.product.N, self.product.K, torch.bfloat16, False)


def choices(config: ModelConfig, size: int, *, alone: bool) -> list[Choice]:
    """The products of one of `size` ranks, the largest first. `alone`: one GPU plays it."""
    D, H, F = config.hidden_size, config.num_heads // size * config.head_dim, config.intermediate_size // size
    qkv = H + 2 * config.kv_heads_per_rank(size) * config.head_dim
    sums = size > 1 and not alone
    found = []
    for name, op, N, K in (
        ("gate_up", "matmul_silu_and_mul", 2 * F, D),
        ("down", "matmul_add", D, F),
        ("qkv", "matmul", qkv, D),
        ("o", "matmul_add", D, H),
        ("lm_head", "matmul", config.vocab_per_rank(size), D),
    ):
        own_op = "matmul" if name in _ADDING and size > 1 else op
        product = Product(name, own_op, N, K)
        found.append(Choice(product, own_op if sums else op))
    return found


class StepTable:
    """The table of this GPU as the engine reads it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lines = load_table(gpu_name(device))
        self._known = set(self._lines)

    def begin(self, choice: Choice, *, norm_apart: bool) -> None:
        """Give a product a line of its own in every bucket, with what serves it so far."""
        N, K = choice.product.N, choice.product.K
        so_far = {
            bucket: tuning.choose_matmul(choice.asked_op, bucket, N, K, torch.bfloat16, False, self._device)
            for bucket in tuning.ROW_BUCKETS
        }
        self._lines.setdefault(choice.asked, so_far)
        if norm_apart:  # as where a sum over ranks stands before the norm
            for op in ("rms_norm_matmul", "rms_norm_matmul_silu_and_mul"):
                apart = {bucket: MatmulConfig("apart", 0, 0, 0, 0) for bucket in tuning.ROW_BUCKETS}
                self._lines[table_key(op, N, K, torch.bfloat16, False)] = apart
        _forget_choices()

    def put(self, choice: Choice, bucket: int, config: MatmulConfig) -> None:
        """From now on this product runs so for so many rows."""
        self._lines[choice.asked][bucket] = config
        _forget_choices()

    def get(self, choice: Choice, bucket: int) -> MatmulConfig:
        return self._lines[choice.asked][min(size for size in self._lines[choice.asked] if size >= bucket)]

    def row(self, choice: Choice, bucket: int) -> dict[str, dict[str, Any]]:
        """What to write of a line: this bucket, or all if there was no such line."""
        line = self._lines[choice.asked]
        buckets = [bucket] if choice.line in self._known else sorted(line)
        return {str(one): asdict(line[one]) for one in buckets}


def _forget_choices() -> None:
    for cached in (tuning._choose, tuning._tuned):
        cached.cache_clear()
