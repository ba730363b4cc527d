"""Every kernel beside the card's ceilings and its peer, in one run: microseconds in a graph, inputs rotated past L2.

    python scripts/bench_kernels.py --only matmul,pointwise --json kernels.json

A family of kernels is a module `rows_<family>.py` with `rows(stopwatch) -> Iterator[Row]`.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

import torch
import triton

from kernel_rows import Row
from kernel_timing import Stopwatch

FAMILIES = tuple(sorted(path.stem.removeprefix("rows_") for path in Path(__file__).parent.glob("rows_*.py")))


def ceilings(stopwatch: Stopwatch) -> tuple[float, float]:
    """Bytes a second of a large copy (read and written), operations a second of a large product by cuBLAS."""
    source = stopwatch.cut(0, 1 << 29)
    target = torch.empty_like(source)
    copy = stopwatch.microseconds(lambda index: target.copy_(source), 1, nodes=4)
    x, w = stopwatch.cut(0, 8192, 8192), stopwatch.cut(1 << 28, 8192, 8192)
    product = stopwatch.microseconds(lambda index: torch.mm(x, w.t()), 1, nodes=8)
    return 4 * source.numel() / copy * 1e6, 2 * 8192**3 / product * 1e6


def measure(stopwatch: Stopwatch, row: Row, bytes_per_s: float, flops_per_s: float) -> dict[str, object]:
    us = stopwatch.microseconds(row.run, row.copies, row.nodes)
    memory, compute = row.num_bytes / us * 1e6 / bytes_per_s, row.num_flops / us * 1e6 / flops_per_s
    peer = None if row.peer is None else stopwatch.microseconds(row.peer, row.copies, row.nodes)
    return {
        "kernel": row.kernel,
        "shape": row.shape,
        "us": us,
        "tb_per_s": row.num_bytes / us / 1e6,
        "tflop_per_s": row.num_flops / us / 1e6,
        "of_ceiling": max(memory, compute),
        "bound": "memory" if memory >= compute else "compute",
        "peer": row.peer_name,
        "peer_us": peer,
        "times_peer": None if peer is None else peer / us,
    }


def line(result: dict[str, object]) -> str:
    rate = f"{result['tb_per_s']:6.2f} TB/s" if result["bound"] == "memory" else f"{result['tflop_per_s']:6.0f} TF  "
    cells = [f"{result['kernel']:34} {result['shape']:36} {result['us']:9.2f} us {rate} {result['of_ceiling']:4.0%}"]
    if result["peer_us"] is not None:
        cells.append(f"{result['peer_us']:9.2f} {result['times_peer']:5.2f}x {result['peer']}")
    return " ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(FAMILIES), help="families, of: %(default)s")
    parser.add_argument("--match", default="", help="only rows whose kernel or shape holds this")
    parser.add_argument("--json", type=Path, help="write the results there too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_kernels: no GPU here")
    stopwatch = Stopwatch()
    bytes_per_s, flops_per_s = ceilings(stopwatch)
    name = torch.cuda.get_device_name()
    print(
        f"{name}, torch {torch.__version__}, triton {triton.__version__}: copy {bytes_per_s / 1e12:.2f} TB/s, ", end=""
    )
    print(f"8192^3 bf16 product {flops_per_s / 1e12:.0f} TFLOP/s", flush=True)
    results = []
    for family in args.only.split(","):
        for row in importlib.import_module(f"rows_{family}").rows(stopwatch):
            if args.match in row.kernel or args.match in row.shape:
                results.append(measure(stopwatch, row, bytes_per_s, flops_per_s))
                print(line(results[-1]), flush=True)
    if args.json:
        about = {"gpu": name, "torch": torch.__version__, "triton": triton.__version__}
        ceiling = {"bytes_per_s": bytes_per_s, "flops_per_s": flops_per_s}
        args.json.write_text(json.dumps({**about, **ceiling, "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
