"""Products of one row with weights of eight bits and four, as they are compiled, without a GPU: all of each block, by
what PTX means. On a GPU: test_triton_kernels_scaled_weight_gpu.py."""

import pytest
import torch
from torch import Tensor

from covering import long
from ptx_machine import Machine
from scaled_weights import META, mx, on_meta, scaled, unrounded
from tercet.triton_kernels.clamped_gate import ClampedGate
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.expert_work import ExpertWork
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.matmul_experts import matmul_experts, matmul_experts_gated
from tercet.triton_kernels.matmul_launch import launch_matmul
from test_triton_kernels_matmul import distance, exact, gated

pytestmark = pytest.mark.skipif(INTERPRETED, reason="it knows no PTX")

BF16, FP16 = torch.bfloat16, torch.float16
NEAR = {BF16: 4e-3, FP16: 5e-4}


def run(ptx: str, given: list[Tensor | int], blocks: int) -> None:
    for block in range(blocks):
        Machine(ptx, dict(enumerate(given)), block).run()


@pytest.mark.parametrize(
    ("epilogue", "K", "groups", "four", "dtype", "of_scales", "warps", "capability"),
    [
        ("store", 2048, 16, False, BF16, None, 4, 90),  # exactly one step
        ("add", 1280, 5, True, BF16, None, 1, 90),  # several, of which the last is not full; groups of two blocks
        ("gate", 640, 5, True, BF16, FP16, 2, 90),
        ("gate", 576, 9, False, FP16, None, 1, 90),
        ("store", 1280, 10, True, FP16, None, 1, 80),
        ("add", 4160, 1, False, BF16, None, 4, 89),
        ("gate", 4096, 32, True, BF16, None, 4, 90),
        ("gate", 1024, 1, True, BF16, None, 1, 90),
        ("store", 1152, 18, True, BF16, FP16, 1, 90),  # groups of half a block
        ("gate", 1152, 6, True, FP16, None, 1, 90),  # of one and a half
    ],
)
def test_one_row(
    epilogue: str, K: int, groups: int, four: bool, dtype: torch.dtype, of_scales: torch.dtype | None, warps: int,
    capability: int,
) -> None:  # fmt: skip
    N, block_n = 10, 4
    w = scaled(N, K, groups, dtype, four=four, of_scales=of_scales)
    x, bias, before = (torch.randn(1, size).to(dtype) for size in (K, N, N))
    out = before.clone() if epilogue == "add" else torch.full_like(before, float("nan"))
    out = out[:, : N // 2].contiguous() if epilogue == "gate" else out
    config = MatmulConfig("vector", 1, block_n, warps * 32 * (32 if four else 16), warps)
    with compiling_for(capability) as kernels:
        launch_matmul(config, x.to(META), on_meta(w), out.to(META), epilogue, bias[0].to(META))
    given = [x, w.numbers_NJ.view(torch.uint8), w.scales_GN, bias, out]
    run(kernels[-1].asm["ptx"], given, -(-N // block_n))
    total = exact(x, unrounded(w), bias[0])
    wanted = {"store": total, "add": total + before.double(), "gate": gated(total)}[epilogue]
    assert distance(out, wanted) < NEAR[dtype]


FP8, FOUR, MX = "FP8", "four bits", "MXFP4"


@pytest.mark.parametrize(
    ("kind", "K", "end"),
    [
        *((FP8, 1280, ""), (FOUR, 1280, "gate"), (MX, 32, "clamped")),
        *((long(FP8, 1280, end)) for end in ("gate", "gelu", "clamped")),
        *((long(MX, 1280, end)) for end in ("", "gate", "clamped")),
        *((long(FOUR, 1280, "")), (long(MX, 2080, "")), (long(MX, 2080, "clamped"))),
    ],
)
def test_experts(kind: str, K: int, end: str) -> None:
    """Each pair's row with the weights of its expert, and nothing where that is none."""
    num_experts, N = 5, 10
    experts = torch.tensor([3, 5, 0, 4, -1, 3], dtype=torch.int32)
    w = mx(num_experts * N, K) if kind == MX else scaled(num_experts * N, K, 10, BF16, four=kind == FOUR)
    x, bias = torch.randn(3 if end else 6, K).to(BF16), torch.randn(num_experts, N).to(BF16)
    out = torch.full((6, N // 2 if end else N), float("nan"), dtype=BF16)
    work = ExpertWork(None, experts.to(META), 1, num_experts)
    limit, slope = 0.75, 1.5
    with compiling_for(90) as kernels:
        if end:
            clamp = ClampedGate(bias.to(META), limit, slope) if end == "clamped" else None
            matmul_experts_gated(x.to(META), on_meta(w), work, 2, clamp, gelu=end == "gelu")
        else:
            matmul_experts(x.to(META), on_meta(w), work)
    settings = torch.tensor([limit, slope]).view(torch.int32).tolist()
    numbers = w.numbers_NJ.view(torch.uint8)
    run(kernels[-1].asm["ptx"], [x, numbers, w.scales_GN, experts, bias, *settings, out], 6 * 2)
    meant = unrounded(w).view(num_experts, N, K)
    for pair, expert in enumerate(experts.tolist()):
        if 0 <= expert < num_experts:
            wanted = exact(x[pair // 2 if end else pair][None], meant[expert])
            if end == "clamped":
                wanted += bias[expert].double()
                gate, up = wanted[:, 0::2].clamp(max=limit), wanted[:, 1::2].clamp(-limit, limit)
                wanted = (up + 1) * gate * torch.sigmoid(slope * gate)
            elif end == "gelu":
                wanted = torch.nn.functional.gelu(wanted[:, 0::2], approximate="tanh") * wanted[:, 1::2]
            elif end:
                wanted = gated(wanted)
            assert distance(out[pair][None], wanted) < NEAR[BF16]
        else:
            assert out[pair].isnan().all()
