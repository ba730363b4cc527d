"""One product on the GPU with inputs of its size: run it by a configuration, check it, or let cuBLAS run it.

Knows the candidates' vocabulary and the launch; measures nothing itself.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_timing import Stopwatch
from matmul_products import Product
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.matmul_launch import launch_matmul

_EPS = 1e-6
TOLERANCE = 5e-3
"""Of `error` in a configuration that is right: bf16 outputs alone are 2e-3 off."""


class MatmulCase:
    def __init__(self, stopwatch: Stopwatch, product: Product, num_rows: int) -> None:
        self.product = product
        self.weights = stopwatch.rotation(product.N, product.K)
        self.x = stopwatch.cut(1 << 30, num_rows, product.K).clone()
        self.norm: Tensor | None = None
        if product.normed:
            self.norm = stopwatch.cut(7, product.K) * product.K**-0.5
        else:
            self.x *= product.K**-0.5  # keeps the gate's exponentials in their range
        columns = product.N // 2 if product.epilogue == "gate" else product.N
        self.out = torch.empty(num_rows, columns, dtype=torch.bfloat16, device="cuda")
        self._peer_out = torch.empty(num_rows, product.N, dtype=torch.bfloat16, device="cuda")

    def run(self, config: MatmulConfig, index: int) -> None:
        launch_matmul(config, self.x, self.weights[index], self.out, self.product.epilogue, None, self.norm, _EPS)

    def peer(self, index: int) -> None:
        """The bare product by cuBLAS: no norm, no gate, no residual."""
        torch.mm(self.x, self.weights[index].t(), out=self._peer_out)

    def error(self, config: MatmulConfig) -> float:
        """Distance from float64 on some rows and columns, relative to the numbers there. Parts are added up."""
        product, w = self.product, self.weights[1]
        before = torch.randn_like(self.out)
        self.out.copy_(before) if product.epilogue == "add" else self.out.fill_(float("nan"))
        torch.cuda.synchronize()
        if config.parts > 1:
            parts = torch.full((config.parts, *self.out.shape), float("nan"), dtype=torch.float32, device="cuda")
            launch_matmul(config, self.x, w, parts, "parts")
            total = parts.sum(0)
            self.out.copy_(total + before if product.epilogue == "add" else total)
        else:
            self.run(config, 1)
        rows = torch.randint(self.x.shape[0], (min(self.x.shape[0], 48),), device="cuda")
        columns = torch.randint(product.N // 2, (128,), device="cuda")
        both = torch.stack((columns * 2, columns * 2 + 1), 1).flatten()
        x = self.x[rows].double()
        if self.norm is not None:
            x = F.rms_norm(x, (product.K,), self.norm.double(), _EPS)
        wanted = x @ w[both].double().T
        if product.epilogue == "gate":
            wanted = F.silu(wanted[:, 0::2]) * wanted[:, 1::2]
            both = columns
        if product.epilogue == "add":
            wanted += before[rows][:, both].double()
        got = self.out[rows][:, both].double()
        return float((got - wanted).norm() / wanted.norm())


def compile_product(product: Product, num_rows: int, config: MatmulConfig, *, counted: bool = False) -> None:
    """Launch on tensors that have no memory. `counted`: as in a prompt's step, which says how many rows there are."""
    x, w = (torch.empty(n, product.K, dtype=torch.bfloat16, device="meta") for n in (num_rows, product.N))
    columns = product.N // 2 if product.epilogue == "gate" else product.N
    out = torch.empty(num_rows, columns, dtype=torch.bfloat16, device="meta")
    epilogue = product.epilogue
    if config.parts > 1 and epilogue in ("add", "store"):
        out, epilogue = torch.empty(config.parts, num_rows, columns, dtype=torch.float32, device="meta"), "parts"
    rows = torch.empty(1, dtype=torch.int32, device="meta") if counted else None
    launch_matmul(config, x, w, out, epilogue, None, x[0] if product.normed else None, _EPS, rows)
