"""From a configuration to the launch of the kernel that it names.

Knows each kernel's arguments and grid; chooses nothing. Shape suffixes as in matmul.py.
"""

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as HopperDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from tercet.triton_kernels.dispatch import is_hopper, multiprocessors
from tercet.triton_kernels.matmul_config import EARLY_BYTES, IN_PARTS, KERNELS, SCALING, MatmulConfig
from tercet.triton_kernels.matmul_draw import Draw
from tercet.triton_kernels.matmul_early import early_kernel
from tercet.triton_kernels.matmul_epilogue import ADD, GATE, SAMPLE, STORE
from tercet.triton_kernels.matmul_fp8 import fp8_kernel
from tercet.triton_kernels.matmul_groups import groups_kernel
from tercet.triton_kernels.matmul_hopper import hopper_kernel
from tercet.triton_kernels.matmul_scaled import scaled_kernel
from tercet.triton_kernels.matmul_skinny import skinny_kernel, split_kernel
from tercet.triton_kernels.matmul_tile import persistent_kernel, tile_kernel, wave_kernel
from tercet.triton_kernels.matmul_vector import vector_kernel
from tercet.triton_kernels.matmul_vector_scaled import vector_scaled_kernel
from tercet.triton_kernels.overlap import overlap_options
from tercet.triton_kernels.round_rows import round_rows, round_whole_rows
from tercet.triton_kernels.scaled_weight import ScaledWeight, Weight
from tercet.triton_kernels.tiles import cdiv, hopper_descriptor

EPILOGUES = {"store": STORE, "parts": STORE, "add": ADD, "gate": GATE, "sample": SAMPLE}


def launch_matmul(
    config: MatmulConfig,
    x_MK: Tensor,
    w_NK: Weight,
    out: Tensor | None,
    epilogue: str = "store",
    bias_N: Tensor | None = None,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    rows: Tensor | None = None,
    draw: Draw | None = None,
) -> None:
    """Run one product as `config` says. `out` is [M, N], or [M, N / 2] for the gate. Graph-safe: fixed grids.

    "sample" has a `draw` in place of `out`, "parts" an `out` [parts, M, N] in fp32; others leave `config.parts` out.

    `norm_K` needs a kernel that can norm its rows: vector, split or early. `rows`: how many rows there are in truth,
    int32 [1] on the device; kernels for many rows leave out tiles behind them.
    """
    M, K = x_MK.shape
    N, each = len(w_NK), 1
    scaled = {"scales_ptr": x_MK, "GROUP": 0, "FOUR": 0}  # there are none
    tile_scales = None
    if isinstance(w_NK, ScaledWeight):
        assert config.kernel in SCALING
        each = 2 if w_NK.four_bits else 1  # numbers in a byte
        scaled = {"scales_ptr": w_NK.scales_GN, "GROUP": w_NK.group, "FOUR": w_NK.kind}
        tile_scales, w_NK = w_NK.tile_scales, w_NK.numbers_NJ
    overlap = overlap_options(x_MK)
    fixed = {
        "N": N,
        "K": K,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "EPILOGUE": EPILOGUES[epilogue].value,
        "HAS_BIAS": bias_N is not None,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **overlap,
    }
    drawing = {**fixed, "draw": draw}
    if out is None:
        assert draw is not None
        out = x_MK  # for its type: nothing is written there
    bias = out if bias_N is None else bias_N
    norm = x_MK if norm_K is None else norm_K
    counted = {"rows_ptr": out if rows is None else rows, "HAS_ROWS": rows is not None}
    tiles_n = cdiv(N, config.width)
    parts = config.parts if epilogue == "parts" else 1
    assert parts == 1 or can_divide(config, K)
    tiles = cdiv(M, config.height) * tiles_n * parts
    precision = "ieee" if x_MK.dtype == torch.float32 else "tf32"
    # Prefetching reads whole tiles, by 16 bytes: it must not reach beyond the last row.
    can_prefetch = overlap["PDL"] and N % config.width == 0 and w_NK.stride(0) * w_NK.itemsize % 16 == 0
    prefetch = min(config.prefetch, K // parts // each) if can_prefetch else 0
    match config.kernel:
        case "vector" if scaled["GROUP"]:
            assert M == 1
            assert norm_K is None
            assert draw is None
            block_k = fixed.pop("BLOCK_K")
            assert block_k == config.num_warps * 32 * 16 * each
            words = w_NK.view(torch.int32)
            vector_scaled_kernel[(tiles_n,)](x_MK, words, bias_ptr=bias, out_ptr=out, **scaled, **fixed)
        case "vector":
            assert M == 1
            vector_kernel[(tiles_n,)](x_MK, norm, eps, w_NK, bias, out, NORM=norm_K is not None, **drawing)
        case "split":
            split_kernel[(tiles,)](
                x_MK, norm, eps, w_NK, bias, out, M=M, BLOCK_M=config.block_m, SPLITS=config.splits,
                PRECISION=precision, NORM=norm_K is not None, PREFETCH=prefetch, **drawing,
            )  # fmt: skip
        case "early":
            assert draw is None
            if not can_be_early(config, x_MK, w_NK, parts):
                raise ValueError(f"{config}: got {M} rows, {N} columns and K = {K}, wanted what its blocks divide")
            early_kernel[(tiles,)](
                x_MK, norm, eps, _early_descriptor(w_NK, config), bias, out, M=M, N=N, K=K, BLOCK_M=config.block_m,
                TILES=3 if config.extra else 1, PARTS=parts, EPILOGUE=fixed["EPILOGUE"], HAS_BIAS=fixed["HAS_BIAS"],
                NORM=norm_K is not None, HOLD=config.hold, num_warps=config.num_warps, **overlap,
            )  # fmt: skip
        case "skinny":
            assert norm_K is None
            skinny_kernel[(tiles,)](
                x_MK, w_NK, bias_ptr=bias, out_ptr=out, M=M, BLOCK_M=config.block_m, PRECISION=precision,
                PREFETCH=prefetch, PARTS=parts, **scaled, **drawing,
            )  # fmt: skip
        case "scaled":
            assert norm_K is None
            assert draw is None
            scaled_kernel[(tiles,)](
                TensorDescriptor.from_tensor(x_MK, [config.block_m, config.block_k]),
                TensorDescriptor.from_tensor(w_NK, [config.block_n, config.block_k // each]),
                w_NK, bias_ptr=bias, out_ptr=out, M=M, BLOCK_M=config.block_m, PREFETCH=prefetch, PARTS=parts,
                **scaled, **counted, **fixed,
            )  # fmt: skip
        case "groups":
            assert norm_K is None
            assert draw is None
            assert K % (parts * config.block_k) == 0
            num_programs = min(multiprocessors(x_MK.device), tiles)
            x_desc = hopper_descriptor(x_MK, config.block_m, config.block_k)
            groups_kernel[(num_programs,)](
                x_desc, hopper_descriptor(x_MK, config.block_m // 2, config.block_k) if config.tall else x_desc,
                hopper_descriptor(w_NK, 64, config.block_k // each),
                bias_ptr=bias, out_ptr=out, M=M, N=N, K=K, GROUPS=config.block_n // 64, STAGES=config.num_stages,
                PARTS=parts, GROUP_M=config.group_m, TALL=config.tall, EPILOGUE=fixed["EPILOGUE"],
                HAS_BIAS=fixed["HAS_BIAS"], num_warps=4, **overlap, **scaled, **counted,
            )  # fmt: skip
        case "fp8":
            assert norm_K is None
            assert draw is None
            assert tile_scales is not None
            numbers_MK, scales_MG = round_rows(x_MK, rows)
            x_desc = hopper_descriptor(numbers_MK, config.block_m, config.block_k)
            width = config.block_n // (2 if config.block_m == 64 else 1) // (2 if epilogue == "gate" else 1)
            fp8_kernel[(min(multiprocessors(x_MK.device), tiles),)](
                x_desc, hopper_descriptor(numbers_MK, 64, config.block_k) if config.tall else x_desc,
                hopper_descriptor(w_NK, config.block_n, config.block_k), scales_MG, tile_scales, bias,
                hopper_descriptor(out, 64, width), M=M, N=N, K=K,
                STAGES=config.num_stages, GROUP_M=config.group_m,
                TALL=config.tall, EPILOGUE=fixed["EPILOGUE"], HAS_BIAS=fixed["HAS_BIAS"], num_warps=4,
                **overlap, **counted,
            )  # fmt: skip
        case "tile":
            assert norm_K is None
            tile_kernel[(tiles,)](
                x_MK, w_NK, bias, out, M=M, BLOCK_M=config.block_m, GROUP_M=config.group_m, PRECISION=precision,
                **counted, **drawing,
            )  # fmt: skip
        case "wave":
            assert norm_K is None
            wave_kernel[(tiles,)](
                TensorDescriptor.from_tensor(x_MK, [config.block_m, config.block_k]),
                TensorDescriptor.from_tensor(x_MK, [config.block_m // 2, config.block_k]),
                TensorDescriptor.from_tensor(w_NK, [config.block_n, config.block_k]),
                TensorDescriptor.from_tensor(w_NK, [config.block_n // 2, config.block_k]),
                w_NK, bias, out, M=M, BLOCK_M=config.block_m, TALL=config.tall, EXTRA=config.extra, PREFETCH=prefetch,
                PARTS=parts, **counted, **drawing,
            )  # fmt: skip
        case "hopper" | "fp8_rows":
            assert norm_K is None
            assert draw is None
            rounds = tile_scales is not None
            assert rounds == (config.kernel == "fp8_rows")
            numbers_MK, scales_M = round_whole_rows(x_MK, rows) if rounds else (x_MK, out)
            most = multiprocessors(x_MK.device)
            hopper_kernel[(min(most, tiles),)](
                hopper_descriptor(numbers_MK, config.block_m, config.block_k),
                hopper_descriptor(w_NK, config.block_n, config.block_k), scales_M, tile_scales if rounds else out, bias,
                hopper_descriptor(out, config.block_m // 2, config.block_n // 2),
                out, M=M, N=N, K=K, STAGES=config.num_stages, GROUP_M=config.group_m, NUM_PROGRAMS=most,
                EPILOGUE=fixed["EPILOGUE"], SCALED=rounds, HAS_BIAS=fixed["HAS_BIAS"], num_warps=4,
                **overlap, **counted,
            )  # fmt: skip
        case "persistent":
            assert norm_K is None
            most = multiprocessors(x_MK.device)
            persistent_kernel[(min(most, tiles),)](
                TensorDescriptor.from_tensor(x_MK, [config.block_m, config.block_k]),
                TensorDescriptor.from_tensor(w_NK, [config.block_n, config.block_k]),
                bias,
                None if draw else TensorDescriptor.from_tensor(out, [config.block_m, config.block_n // 2]),
                M=M, BLOCK_M=config.block_m, GROUP_M=config.group_m, NUM_PROGRAMS=most, **counted, **drawing,
            )  # fmt: skip
        case _:
            raise ValueError(f"matmul kernel: got {config.kernel!r}, wanted one of {KERNELS}")


def can_divide(config: MatmulConfig, K: int) -> bool:
    """Whether the kernel can divide K among programs as `config` says: parts of whole blocks."""
    return config.kernel in IN_PARTS and K % (config.parts * config.block_k * _chunks(config)) == 0


def can_be_early(config: MatmulConfig, x_MK: Tensor, w_NK: Tensor, parts: int = 1) -> bool:
    """Whether the early kernel can do this product."""
    (M, K), N = x_MK.shape, w_NK.shape[0]
    return fits_early(config, M, N, K, parts) and can_use_tma(x_MK, w_NK)


def fits_early(config: MatmulConfig, M: int, N: int, K: int, parts: int) -> bool:
    """Whether the early kernel can do this size: it knows no blocks that are not full, of columns or of K."""
    full = N % config.width == 0 and K % (parts * config.block_k * _chunks(config)) == 0
    return full and config.block_m >= M and config.width * (K // parts) * 2 <= EARLY_BYTES


def _chunks(config: MatmulConfig) -> int:
    return config.splits if config.kernel == "early" else 1


def num_tiles(config: MatmulConfig, N: int) -> int:
    """In how many tiles a row is drawn: so many scores a product writes."""
    return -(-N // config.width) * (2 if config.extra or config.kernel == "persistent" else 1)


def _early_descriptor(w_NK: Tensor, config: MatmulConfig) -> HopperDescriptor:
    """Weights as chunks of K, so that one copy brings many: [K / block_k, N, block_k]."""
    N, K = w_NK.shape
    chunks = w_NK.view(N, K // config.block_k, config.block_k).permute(1, 0, 2)
    block = [config.splits, config.block_n // 2 if config.extra else config.block_n, config.block_k]
    return HopperDescriptor.from_tensor(chunks, block, _early_layout(config.block_k))


@functools.cache
def _early_layout(block_k: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=block_k * 2, element_bitwidth=16, rank=3)


def can_use_tma(x_MK: Tensor, *others: Tensor) -> bool:
    """TMA wants 16-byte rows and starts, numbers of two bytes or one, and a card that has it."""
    return is_hopper(x_MK.device) and all(
        tensor.stride(0) * tensor.itemsize % 16 == 0 and tensor.data_ptr() % 16 == 0 and tensor.itemsize <= 2
        for tensor in (x_MK, *others)
    )
