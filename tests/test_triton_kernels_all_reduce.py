"""Sums through peer memory: the kernels of ranks in processes of their own, which write into each other's memory."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from covering import covering, long
from peer_rank import EPS, HIDDEN, drawn
from tercet.triton_kernels.all_reduce import all_reduce, all_reduce_add_rms_norm, all_reduce_parts, sum_in_order
from tercet.triton_kernels.all_reduce_words import stack_rows
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.inbox import RowInboxes, WordInboxes

pytestmark = pytest.mark.skipif(INTERPRETED, reason="starts interpreting processes itself")
ROWS = [3, 1, 6, 6, 1, 2]
KINDS = ["WordInboxes", "RowInboxes"]


def run_ranks(size: int, folder: Path, dtype: str, *arguments: object) -> None:
    command = [sys.executable, str(Path(__file__).parent / "peer_rank.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), str(size), str(folder), dtype, *map(str, arguments)], env=environment)
        for rank in range(size)
    ]
    try:
        assert [rank.wait(300) for rank in ranks] == [0] * size
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def results_of(size: int, folder: Path, dtype: str) -> list[dict[str, torch.Tensor]]:
    run_ranks(size, folder, dtype, *ROWS)
    return [load_file(folder / f"{rank}.safetensors") for rank in range(size)]


# No bfloat16: the interpreter does not round to it, it cuts.
@pytest.mark.parametrize(("size", "dtype"), [long(2, "float16"), (3, "float32")])
def test_ranks_of_their_own(size: int, dtype: str, tmp_path: Path) -> None:
    results = results_of(size, tmp_path, dtype)
    for others in results[1:]:
        assert others.keys() == results[0].keys()
        assert all(torch.equal(others[name], results[0][name]) for name in others), "ranks must agree to the bit"
    got, torch_dtype = results[0], getattr(torch, dtype)
    weight = drawn("weight", 0, 0, 1, torch_dtype)[0].double()
    tolerance = {"rtol": torch.finfo(torch_dtype).eps, "atol": torch.finfo(torch_dtype).eps * 8}
    for call, rows in enumerate(ROWS):

        def parts(name: str, call: int = call, rows: int = rows) -> torch.Tensor:
            return torch.stack([drawn(name, rank, call, rows, torch_dtype) for rank in range(size)])

        for kind in KINDS:
            total = got[f"{kind} sum{call}"]
            assert torch.equal(total, sum_in_order(parts("sum")))
            torch.testing.assert_close(total.double(), parts("sum").double().sum(0), **tolerance)
            residual = drawn("residual", 0, call, rows, torch_dtype).double() + parts("update").double().sum(0)
            torch.testing.assert_close(got[f"{kind} residual{call}"].double(), residual, **tolerance)
            assert torch.equal(got[f"{kind} residual{call}"], got[f"{kind} added{call}"]), (
                "fused or apart, the residual has the same bits"
            )
            normed = residual * (residual.square().mean(1, keepdim=True) + EPS).rsqrt() * weight
            out = got[f"{kind} normed{call}"]
            torch.testing.assert_close(out.double(), normed, rtol=4 * tolerance["rtol"], atol=2e-2)
            torch.testing.assert_close(out, got[f"{kind} apart{call}"], **tolerance)
            # What each rank has in parts is rounded once before it is sent.
            own = [
                sum(drawn(f"part {i}", rank, call, rows, torch.float32) for i in range(3)).to(torch_dtype)
                for rank in range(size)
            ]
            assert torch.equal(got[f"{kind} parts{call}"], sum_in_order(torch.stack(own)))
            assert torch.equal(got[f"{kind} parts added{call}"], got[f"{kind} parts added apart{call}"])
            apart = got[f"{kind} parts apart{call}"]
            torch.testing.assert_close(got[f"{kind} normed parts{call}"], apart, **tolerance)
        words = torch.arange(rows * 2, dtype=torch.int32).view(rows, 2) - call
        assert torch.equal(got[f"stacked{call}"], torch.stack([words - 1000 * rank for rank in range(size)]))


def test_one_rank_alone_waits_for_nobody(tmp_path: Path) -> None:
    run_ranks(1, tmp_path, "float32", *ROWS[:2])
    got = load_file(tmp_path / "0.safetensors")
    for kind in KINDS:
        assert torch.equal(got[f"{kind} sum0"], drawn("sum", 0, 0, ROWS[0], torch.float32))


@pytest.mark.parametrize(("size", "dtype"), [(2, "float32"), long(4, "float16")])
def test_calls_that_follow_each_other(size: int, dtype: str, tmp_path: Path) -> None:
    run_ranks(size, tmp_path, dtype, "--follow", 30)


def meta_inboxes(kind: type[Any], size: int, rows: int, row_bytes: int) -> Any:
    addresses = tuple(0x7F0000000000 + (rank << 26) for rank in range(size))
    return kind(size - 1, addresses, torch.empty(rows, dtype=torch.int32, device="meta"), row_bytes, None)


def compiled(capability: int, inboxes: Any, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """Both sums, for two widths of rows."""
    with compiling_for(capability) as kernels:
        for hidden in (4096, 5120):
            x = torch.empty(17, hidden, dtype=dtype, device="meta")
            all_reduce(x, inboxes)
            all_reduce_add_rms_norm(x, x, x[0], 1e-6, inboxes)
            parts = torch.empty(2, 17, hidden, device="meta")
            all_reduce_parts(parts, x.dtype, inboxes)
            all_reduce_add_rms_norm(parts, x, x[0].float(), 1e-6, inboxes)
        if isinstance(inboxes, WordInboxes):
            stack_rows(torch.empty(17, 2, dtype=torch.int32, device="meta"), inboxes)
    return kernels


@covering(1, kind=[WordInboxes, RowInboxes], dtype=[torch.float32, torch.float16])
def test_compile_other_types(kind: type[Any], dtype: torch.dtype) -> None:
    for size in (2, 4):
        for kernel in compiled(90, meta_inboxes(kind, size, 256, 20480), dtype):
            assert kernel.asm["cubin"]


@pytest.mark.parametrize(("capability", "size"), [(80, 2), long(90, 2), (90, 4)])
def test_compile_words(capability: int, size: int) -> None:
    kernels = compiled(capability, meta_inboxes(WordInboxes, size, 256, 10240))
    assert len(kernels) == 2 * 4 + 1
    for kernel in kernels:
        ptx = kernel.asm["ptx"]
        assert kernel.asm["cubin"]
        assert "ld.volatile.global" in ptx, "words that others write must be read again"
        assert ("griddepcontrol.wait" in ptx) == (capability == 90)
        assert ptx.index("bar.sync") < ptx.index("st.global.b32"), "the call counts only once every warp has read it"
        if kernel.name != "_stack_rows_kernel":
            assert "st.global.v2.b64" in ptx, "words and numbers of calls go out in wide stores"


def steps_of(ptx: str) -> list[str]:
    """What happens to rows and flags, in order, the same once."""
    steps = ["st.global.v4", "bar.sync", "sys.release.exch", "sys.acquire", "ld.global.cg"]
    found = re.findall("|".join(map(re.escape, steps)), ptx)
    return [step for i, step in enumerate(found) if i == 0 or step != found[i - 1]]


def check_rows(kernels: list[Any], capability: int) -> None:
    assert len(kernels) == 2 * 4
    for kernel in kernels:
        ptx = kernel.asm["ptx"]
        assert kernel.asm["cubin"]
        assert ("griddepcontrol.wait" in ptx) == (capability == 90)
        assert "ld.global.cg.v4.b32" in ptx
        assert ptx.index("bar.sync") < ptx.index("st.global.b32"), "the call counts only once every warp has read it"


@pytest.mark.parametrize("capability", [80, 90])
def test_compile_rows_of_two(capability: int) -> None:
    kernels = compiled(capability, meta_inboxes(RowInboxes, 2, 2048, 10240))
    check_rows(kernels, capability)
    for kernel in kernels:
        ptx = kernel.asm["ptx"]
        # A flag goes out behind every warp's row; a row is read, not from the L1, behind the acquired flag.
        sent, received = ["st.global.v4", "bar.sync", "sys.release.exch"], ["sys.acquire", "bar.sync", "ld.global.cg"]
        assert steps_of(ptx)[:7] == [*sent, "bar.sync", *received]
        assert ptx.count("sys.release.exch") == ptx.count("sys.acquire") == 1


@pytest.mark.parametrize(("capability", "size"), [(80, 4), (90, 3), long(90, 4)])
def test_compile_rows_in_slices(capability: int, size: int) -> None:
    kernels = compiled(capability, meta_inboxes(RowInboxes, size, 2048, 10240))
    check_rows(kernels, capability)
    for kernel in kernels:
        ptx = kernel.asm["ptx"]
        # Twice the same way: first slices, then sums.
        steps = [step for step in steps_of(ptx) if step not in ("st.global.v4", "bar.sync")]
        assert steps == ["sys.release.exch", "sys.acquire", "ld.global.cg"] * 2
        assert ptx.count("sys.release.exch") == ptx.count("sys.acquire") == 2, "one thread a peer, all at once"
        for hop in ptx.split("sys.release.exch")[:2]:
            # Nothing is written between the last barrier and the release but the flag.
            assert "st.global" not in hop.rsplit("bar.sync", 1)[1], "a flag goes out behind every warp's slice"
        for hop in ptx.split("sys.acquire")[1:]:
            assert "bar.sync" in hop.split("ld.global.cg", 1)[0], "all warps read behind the acquired flags"


@pytest.mark.parametrize("kind", [WordInboxes, RowInboxes])
def test_what_fits(kind: type[Any]) -> None:
    inboxes = meta_inboxes(kind, 2, 4, 64)
    with pytest.raises(ValueError, match=r"got 5 rows of 64 bytes, wanted 1 to 4 rows of at most 64"):
        all_reduce(torch.zeros(5, 32, dtype=torch.float16), inboxes)
    with pytest.raises(ValueError, match=r"got 4 rows of 68 bytes"):
        all_reduce(torch.zeros(4, 17), inboxes)
    with pytest.raises(ValueError, match=r"residual: got shape \[3, 16\], wanted \[4, 16\]"):
        all_reduce_add_rms_norm(torch.zeros(4, 16), torch.zeros(3, 16), torch.zeros(16), EPS, inboxes)
    with pytest.raises(ValueError, match=r"x: got torch.int32, wanted"):
        all_reduce(torch.zeros(4, 16, dtype=torch.int32), inboxes)


def test_what_each_kind_asks_for() -> None:
    with pytest.raises(ValueError, match=r"rows of 31 numbers of torch.float16, wanted whole words"):
        all_reduce(torch.zeros(4, 31, dtype=torch.float16), meta_inboxes(WordInboxes, 2, 4, 64))
    with pytest.raises(ValueError, match=r"places of 72 bytes, wanted a multiple of 16"):
        meta_inboxes(RowInboxes, 2, 4, 72)
    assert HIDDEN * 2 % 16
