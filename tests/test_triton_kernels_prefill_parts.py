"""Tiles of queries are cut by keys into parts that hold each key once, and merged to what they are whole. In the
interpreter, with the sums of parts made by torch; the kernel that makes them is for GPUs."""

import random

import pytest
import torch
from torch import Tensor

from covering import long
from interpreted import rerun_interpreted
from paged_attention import Heads, PagedCache, assert_near
from tercet.triton_kernels.attention import DEEP, most_deep, plan_prefill
from tercet.triton_kernels.attention_reference import Scoring
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.merge_splits import merge_splits
from tercet.triton_kernels.prefill_parts import plan_prefill_parts
from tercet.triton_kernels.prefill_work import PrefillWork, make_prefill_work, plan_prefill_work

QUERIES, KEYS, HEADS, DIM = 64, 128, 3, 16

CASES = [
    [(2, 8192, 40)],
    [(1, 0, 1), (2, 5000, 0), (0, 999, 70), (3, 20_000, 64)],
    [(0, 511, 1), (1, 512, 1), (2, 513, 65)],
    [(0, 120_000, 200)],
    [(slot, random.randrange(9000), random.randint(1, 40)) for slot in range(8)],
    [(0, 0, 0)],
]
"""Chunks of (slot, start, count)."""


def planned(
    chunks: list[tuple[int, int, int]], padding: int, num_programs: int, heads: int = 1
) -> tuple[PrefillWork, PrefillWork]:
    begins = [0]
    for _, _, count in chunks:
        begins.append(begins[-1] + count)
    num_tokens = begins[-1] + padding
    slots, starts = (torch.tensor([chunk[part] for chunk in chunks], dtype=torch.int32) for part in range(2))
    work = make_prefill_work(num_tokens, len(chunks), QUERIES, torch.device("cpu"))
    plan_prefill_work(slots, starts, torch.tensor(begins, dtype=torch.int32), num_tokens, work)
    return work, plan_prefill_parts(work, num_tokens, HEADS, DIM, num_programs, KEYS, heads=heads)


@pytest.mark.skipif(not INTERPRETED, reason="the kernels, in the interpreter")
@pytest.mark.parametrize(("num_programs", "heads"), [(2, 1), long(132, 1), (200, 2), long(400, 1)])
@pytest.mark.parametrize("padding", [1, 90])
@pytest.mark.parametrize("chunks", CASES, ids=lambda chunks: f"{len(chunks)}chunks")
def test_each_key_is_in_one_part(
    chunks: list[tuple[int, int, int]], padding: int, num_programs: int, heads: int
) -> None:
    work, cut = planned(chunks, padding, num_programs, heads)
    assert cut.heads == heads
    num_tiles, padded = work.tiles_N8[-1, :2].tolist()
    num_parts, all_parts = cut.tiles_N8[-1, :2].tolist()
    parts = cut.tiles_N8.tolist()
    at_once = num_programs * heads // HEADS
    assert num_parts <= max(at_once, num_tiles)
    index = 0
    for tile in work.tiles_N8[:num_tiles].tolist():
        count, begin = parts[index][7], 0
        assert count >= 1
        for part in parts[index : index + count]:
            assert part[:4] == tile[:4]
            assert part[5:] == [tile[5], begin, count]
            assert part[4] == tile[4] or part[4] % KEYS == 0
            assert count == 1 or part[4] - begin * KEYS > 3 * KEYS, "some query may see nothing of it"
            begin = part[4] // KEYS
        assert parts[index + count - 1][4] == tile[4]
        index += count
    assert index == num_parts
    assert [part[:2] + part[4:5] for part in parts[index:all_parts]] == [
        [*tile[:2], 0] for tile in work.tiles_N8[num_tiles:padded].tolist()
    ]
    # Parts are as short as they can be, of four tiles of keys at least, while there are programs for them.
    seen = [-(-tile[4] // KEYS) for tile in work.tiles_N8[:num_tiles].tolist()]
    ways = [[min(-(-keys // most), max(keys // 4, 1)) for keys in seen] for most in range(1, max(seen, default=0) + 1)]
    wanted = next((counts for counts in ways if sum(counts) <= at_once), [1] * num_tiles)
    assert [parts[sum(wanted[:tile])][7] for tile in range(num_tiles)] == wanted


@pytest.mark.skipif(not INTERPRETED, reason="the kernels, in the interpreter")
@pytest.mark.parametrize("chunks", CASES[:3], ids=lambda chunks: f"{len(chunks)}chunks")
def test_parts_are_merged_to_the_whole(chunks: list[tuple[int, int, int]]) -> None:
    _, cut = planned(chunks, 7, 132)
    assert cut.parts is not None
    sums, stats = cut.parts.sums_QHD.fill_(float("nan")), cut.parts.stats_QH2.fill_(float("nan"))
    num_tokens = len(cut.parts.counts_T)
    most = max(start + count for _, start, count in chunks)
    scores, values = torch.randn(num_tokens, HEADS, most), torch.randn(HEADS, most, DIM)
    wanted = torch.full((num_tokens, HEADS, DIM), float("nan"))
    out = wanted.clone()
    for index, part in enumerate(cut.tiles_N8[: int(cut.tiles_N8[-1, 0])].tolist()):
        first, queries, position, _, seen, _, begin, count = part
        for query in range(queries):
            last = min(seen, position + query + 1)
            whole = scores[first + query, :, : position + query + 1]
            wanted[first + query] = attend(whole, values)[0]
            if count == 1:
                out[first + query] = wanted[first + query]
                continue
            place = index * QUERIES + query
            own, largest, weight = attend(scores[first + query, :, begin * KEYS : last], values[:, begin * KEYS :])
            sums[place] = own * weight[:, None]
            stats[place] = torch.stack([largest, weight], 1)
    merge_splits(cut.parts.counts_T, cut.parts.starts_T, sums, stats, out, stride=QUERIES)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)


def attend(scores_HL: Tensor, values_HLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A query's values, its largest score in units of log 2, and its weight relative to that."""
    largest_H = scores_HL.amax(1) / torch.log(torch.tensor(2.0))
    weight_H = (scores_HL - scores_HL.amax(1, keepdim=True)).exp().sum(1)
    y_HD = torch.einsum("hl,hld->hd", scores_HL.softmax(1), values_HLD[:, : scores_HL.shape[1]])
    return y_HD, largest_H, weight_H


@pytest.mark.skipif(not INTERPRETED, reason="the kernels, in the interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, long(torch.float16)])
@pytest.mark.parametrize(
    "heads",
    [
        Heads(2, 1, 64, 16),
        Heads(2, 2, 80, 64, softcap=5.0),
        Heads(1, 1, 16, 32, alibi=True),
        Heads(2, 1, 24, 32, sinks=True),
        Heads(7, 1, 32, 128),
    ],
    ids=str,
)
def test_few_queries_behind_many(heads: Heads, dtype: torch.dtype) -> None:
    """The kernel that is not Hopper's. Twelve of its programs run at once here: of seven heads no two parts."""
    cache = PagedCache(heads, [1500, 20, 1023, 1025, 300, 900], "cpu", dtype)
    scoring = Scoring(heads.dim**-0.5, softcap=heads.softcap)
    most = {1: 96, 2: 48, 7: 0}[heads.num_q]
    assert most_deep(heads.num_q, cache.k_cache, scoring) == ({DEEP: most} if most else {})
    for chunks, padding in (
        ([(0, 1480, 9)], 6),
        ([(2, 1022, 1), (3, 1024, 1)], 1),
        ([(0, 1000, 2), (1, 3, 5), (4, 255, 6)], 3),
        ([(5, 890, 10)], 40),
    ):
        q = cache.queries(sum(count for _, _, count in chunks) + padding)
        tables = cache.ints([0]), cache.ints([0]), cache.ints([0, 1])
        work = plan_prefill(*tables, *q.shape[:2], cache.k_cache, scoring, deep=DEEP)
        assert (work.parts is not None) == bool(most)
        got = cache.prefill(q, chunks, deep=DEEP)
        assert_near(cache, q, got, chunks, 1e-5 if dtype == torch.float32 else 2e-3)


def test_interpreted() -> None:
    rerun_interpreted(__file__)
