"""Products with weights as the tuners know them, and those of the public shapes that they tune for.

Knows names and sizes; no kernel.
"""

from dataclasses import dataclass

NORMED = "rms_norm_"


@dataclass(frozen=True)
class Product:
    """One weight of a model and what is fused with it: `op` is the wrapper's name."""

    name: str
    op: str
    N: int
    K: int

    @property
    def epilogue(self) -> str:
        return {"matmul": "store", "matmul_add": "add", "matmul_silu_and_mul": "gate", "matmul_sample": "sample"}[
            self.op.removeprefix(NORMED)
        ]

    @property
    def draws(self) -> bool:
        return self.epilogue == "sample"

    @property
    def normed(self) -> bool:
        return self.op.startswith(NORMED)


PRODUCTS = (
    Product("0.6b.qkv", "matmul", 4096, 1024),
    Product("0.6b.o", "matmul_add", 1024, 2048),
    Product("0.6b.gate_up", "matmul_silu_and_mul", 6144, 1024),
    Product("0.6b.down", "matmul_add", 1024, 3072),
    Product("0.6b.lm_head", "matmul", 151936, 1024),
    Product("8b.qkv", "matmul", 6144, 4096),
    Product("8b.o", "matmul_add", 4096, 4096),
    Product("8b.gate_up", "matmul_silu_and_mul", 24576, 4096),
    Product("8b.down", "matmul_add", 4096, 12288),
    Product("8b.lm_head", "matmul", 151936, 4096),
    Product("0.6b.norm_qkv", "rms_norm_matmul", 4096, 1024),
    Product("0.6b.norm_gate_up", "rms_norm_matmul_silu_and_mul", 6144, 1024),
    Product("8b.norm_qkv", "rms_norm_matmul", 6144, 4096),
    Product("8b.norm_gate_up", "rms_norm_matmul_silu_and_mul", 24576, 4096),
    # One of two ranks: what it adds to the residual is summed over ranks first.
    Product("8b_tp2.qkv", "matmul", 3072, 4096),
    Product("8b_tp2.o", "matmul", 4096, 2048),
    Product("8b_tp2.gate_up", "matmul_silu_and_mul", 12288, 4096),
    Product("8b_tp2.down", "matmul", 4096, 6144),
    Product("8b_tp2.lm_head", "matmul", 75968, 4096),
)
# The same weights as a decode step ends with them: no logits, a token for each row.
DRAWS = (
    Product("0.6b.draw", "matmul_sample", 151936, 1024),
    Product("8b.draw", "matmul_sample", 151936, 4096),
    Product("8b_tp2.draw", "matmul_sample", 75968, 4096),
)
