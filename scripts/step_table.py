"""The products of a model's step, and the table that says how each runs, with configurations that are tried.

Knows which lines of the table a step asks; measures nothing.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from matmul_products import NORMED, Product
from tercet.model.config import ModelConfig
from tercet.triton_kernels import tuning
from tercet.triton_kernels.dispatch import gpu_name
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.tuning import load_table, read_table, table_key

_ADDING = ("o", "down")
"""What they make is added to the residual: by the product itself where there is one rank, else behind the sum."""
_NORMING = ("gate_up", "qkv", "lm_head")
"""What they read is normed first: by themselves where few rows make that pay."""
_APART = MatmulConfig("apart", 0, 0, 0, 0)
_NORMED_BUCKETS = (1, 8, 16)
"""Of more rows no product norms its own."""


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

    @property
    def normed(self) -> str:
        """The line of the same product with the norm before it, whether there is one or not."""
        return self._line(NORMED + self.product.op)

    def _line(self, op: str) -> str:
        return table_key(op, self.product.N, self.product.K, torch.bfloat16, False)


def choices(config: ModelConfig, size: int, *, alone: bool) -> list[Choice]:
    """The products of one of `size` ranks, the largest first. `alone`: one GPU plays it.

    Where nothing is summed between a norm and the product behind it, both together are one more.
    """
    D, H, F = config.hidden_size, config.num_heads // size * config.head_dim, config.intermediate_size // size
    qkv = H + 2 * config.heads.of_rank(size) * config.head_dim
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
        if name in _NORMING and size == 1:
            found.append(Choice(Product(f"norm_{name}", NORMED + op, N, K), NORMED + op))
    return found


class StepTable:
    """The table of this GPU as the engine reads it."""

    def __init__(self, device: torch.device, found: Path | None = None) -> None:
        """`found`: what the tuner wrote in earlier runs, ahead of what the GPU's own table says."""
        self._device = device
        self._lines = load_table(gpu_name(device))
        self._known = set(self._lines)
        if found is not None and found.exists():
            for line, buckets in read_table(found).items():
                self._lines.setdefault(line, {}).update(buckets)

    def begin(self, choice: Choice, *, norm_apart: bool) -> None:
        """Give a product a line of its own in every bucket, with what serves it so far."""
        N, K = choice.product.N, choice.product.K
        so_far = {
            bucket: tuning.choose_matmul(choice.asked_op, bucket, N, K, torch.bfloat16, False, self._device)
            for bucket in (_NORMED_BUCKETS if choice.product.normed else tuning.ROW_BUCKETS)
        }
        self._lines.setdefault(choice.asked, so_far)
        if norm_apart:  # as where a sum over ranks stands before the norm
            self._lines[choice.normed] = dict.fromkeys(tuning.ROW_BUCKETS, _APART)
        _forget_choices()

    def part_norm(self, choice: Choice, bucket: int) -> None:
        """Have the norm before a product on its own for so many rows, so that the product is asked for at all."""
        if bucket in self._lines.get(choice.normed, ()):
            self._lines[choice.normed][bucket] = _APART
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
    tuning._choose.cache_clear()
