"""What the tuner inside a step tries and writes; the measuring needs a GPU."""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tune_step
from captured_step import share_of_rank
from matmul_candidates import asking_ahead, near_candidates
from matmul_products import PRODUCTS
from pair_search import best_together
from shapes import SHAPES
from step_table import Choice, StepTable, choices
from tercet.model.config_json import parse_config
from tercet.model.parallel import Group
from tercet.triton_kernels import tuning
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.matmul_launch import can_divide
from tercet.triton_kernels.tuning import load_table, read_table
from tuned_table import merge_into_table, write_table

CONFIG = parse_config(SHAPES["qwen3-0.6b"])
TABLES = sorted(Path(tuning.__file__).parent.glob("tuned/*.json"))


def _head(found: list[Choice]) -> tuple[int, int]:
    return next((one.product.N, one.product.K) for one in found if one.product.name == "lm_head")


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("name", "prefix", "size"), [("0.6b", "0.6b.", 1), ("8b", "8b.", 1), ("8b", "8b_tp2.", 2)])
def test_products_of_a_rank(name: str, prefix: str, size: int, alone: bool) -> None:
    found = choices(parse_config(SHAPES[f"qwen3-{name}"]), size, alone=alone)
    listed = {(one.op, one.N, one.K) for one in PRODUCTS if one.name.startswith(prefix)}
    asked = {(one.product.op, one.product.N, one.product.K) for one in found}
    assert asked - listed == ({("rms_norm_matmul", *_head(found))} if size == 1 else set())
    assert listed <= asked
    assert {one.asked != one.line for one in found if one.divided} == {size > 1 and alone}


def test_the_share_of_a_rank_is_a_model() -> None:
    share = share_of_rank(parse_config(SHAPES["qwen3-32b"]), 4, 3)
    assert (share.num_heads, share.num_kv_heads, share.intermediate_size, share.vocab_size) == (16, 2, 6400, 37984)
    assert (share.hidden_size, share.num_layers, share.layer_windows) == (5120, 3, (0, 0, 0))
    with pytest.raises(ValueError, match="--tensor-parallel-size is 3"):
        share_of_rank(parse_config(SHAPES["qwen3-32b"]), 3, 3)


@pytest.mark.parametrize("num_rows", [1, 8, 64, 256, 8192])
def test_candidates_fit_the_product(num_rows: int) -> None:
    table = load_table("NVIDIA H200")
    for choice in choices(parse_config(SHAPES["qwen3-32b"]), 4, alone=False):
        found = near_candidates(choice.product, num_rows, table, divided=choice.divided)
        assert len(set(found)) == len(found) > 5
        assert all(one.parts == 1 or can_divide(one, choice.product.K) for one in found)
        assert all((one.kernel == "vector") <= (num_rows == 1) for one in found)
        ahead = {two for one in found for two in asking_ahead(one, num_rows, choice.product.K)}
        assert bool(ahead) == (num_rows <= 256)
        assert {replace(one, prefetch=0) for one in ahead} <= set(found)


@pytest.mark.parametrize(("num_rows", "some"), [(1, True), (8, True), (16, True), (64, False)])
def test_candidates_that_norm_their_rows(num_rows: int, some: bool) -> None:
    table = load_table("NVIDIA H200")
    normed = [one for one in choices(parse_config(SHAPES["qwen3-0.6b"]), 1, alone=False) if one.product.normed]
    assert [one.product.name for one in normed] == ["norm_gate_up", "norm_qkv", "norm_lm_head"]
    for choice in normed:
        found = near_candidates(choice.product, num_rows, table, divided=choice.divided)
        assert {one.kernel for one in found} <= {"vector", "split", "early"}
        assert bool(found) == some or choice.product.N > 50_000
        chosen = table[choice.line].get(num_rows)
        assert chosen is None or chosen.kernel == "apart" or replace(chosen, prefetch=0) in found


@pytest.mark.usefixtures("empty_table")
def test_a_product_is_asked_for_where_its_norm_is_apart() -> None:
    table = StepTable(torch.device("cpu"))
    plain, normed, *_ = choices(parse_config(SHAPES["qwen3-0.6b"]), 1, alone=False)
    for choice in (plain, normed):
        table.begin(choice, norm_apart=False)
    assert (plain.normed, {table.get(normed, bucket).kernel for bucket in (8, 16)}) == (normed.line, {"split"})
    table.part_norm(plain, 8)
    assert [table.get(normed, bucket).kernel for bucket in (8, 16)] == ["apart", "split"]
    table.part_norm(plain, 64)  # of so many rows every norm is apart
    assert set(table.row(normed, 8)) == {"1", "8", "16"}


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_a_table_is_written_as_it_was(table: Path, tmp_path: Path) -> None:
    write_table(json.loads(table.read_text())["matmul"], tmp_path / "same.json")
    assert (tmp_path / "same.json").read_text() == table.read_text()


def test_a_bucket_is_merged_into_its_line(tmp_path: Path) -> None:
    table = tmp_path / "card.json"
    one, other = ({"kernel": kernel, "block_m": 8, "block_n": 16, "block_k": 64, "num_warps": 1} for kernel in "ab")
    merge_into_table({"line": {"64": one, "8": one}}, table)
    merge_into_table({"line": {"16": other, "8": other}, "next": {"1": one}}, table)
    lines = json.loads(table.read_text())["matmul"]
    assert list(lines["line"]) == ["8", "16", "64"]
    assert lines == {"line": {"8": other, "16": other, "64": one}, "next": {"1": one}}
    assert MatmulConfig(**lines["line"]["64"]).num_stages == 3


def test_pairs_find_what_pays_only_together() -> None:
    costs = {(0, 0, 0): 10.0, (1, 0, 0): 11.0, (0, 1, 0): 12.0, (1, 1, 0): 8.0, (1, 1, 1): 7.99, (1, 1, 2): 5.0}
    asked: list[tuple[int, ...]] = []

    def cost(tried: Mapping[str, int]) -> float:
        asked.append(tuple(tried[name] for name in "abc"))
        return costs.get(asked[-1], 20.0)

    values = {"a": [0, 1], "b": [0, 1], "c": [0, 1, 2]}
    assert best_together(values, cost, gain=0.01, in_time=lambda: True) == {"a": 1, "b": 1, "c": 2}
    # A gain of a thousandth is none; and what was found in time is kept.
    del costs[1, 1, 2]
    assert best_together(values, cost, gain=0.01, in_time=lambda: True) == {"a": 1, "b": 1, "c": 0}
    asked.clear()
    assert best_together(values, cost, gain=0.01, in_time=lambda: len(asked) < 4) == {"a": 1, "b": 1, "c": 0}
    assert len(asked) == 4


class PretendedStep:
    """A step on no GPU, which is faster only if two products' configurations are others, both of them."""

    def __init__(self, *sizes: Any) -> None:
        pass

    def decode(self, num_rows: int) -> "PretendedStep":
        return self

    def microseconds(self, at_most: float) -> float:
        lines = load_table("")
        changed = {line.split()[1] for line, buckets in lines.items() if buckets[8].num_warps == 2}
        together = {"1024x2048", "1024x3072"}
        return 100.0 + 3 * len(changed) - 30 * (together <= changed)


@pytest.fixture
def empty_table() -> Iterator[None]:
    """Of a GPU without a name; nothing of what is put into it stays."""
    assert load_table("") == {}
    yield
    load_table("").clear()
    tuning._choose.cache_clear()


@pytest.fixture
def _pretended_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_step, "StepModel", PretendedStep)
    monkeypatch.setattr(tune_step, "Stopwatch", lambda: None)
    monkeypatch.setattr(tune_step, "is_right", lambda *case: True)


def tuner_arguments(folder: Path) -> argparse.Namespace:
    return argparse.Namespace(
        seconds=60, log=folder / "log", tensor_parallel_size=1, alone=False, layers=2, context=9, model=None,
        shape="qwen3-0.6b", table=folder / "card.json", together=0, rows=[8, 64], products=[], gpu="NVIDIA H200",
    )  # fmt: skip


@pytest.mark.usefixtures("empty_table", "_pretended_steps")
def test_the_tuner_goes_through_what_there_is_to_try(tmp_path: Path) -> None:
    """Of products that norm their own rows there is nothing to try for 64."""
    arguments = tuner_arguments(tmp_path)
    tune_step.StepTuner(arguments, CONFIG, Group.single(torch.device("cpu"))).run()
    lines = json.loads(arguments.table.read_text())["matmul"]
    for choice in choices(CONFIG, 1, alone=False):
        assert {"8"} | ({"64"} if not choice.product.normed else set()) <= lines[choice.line].keys()
        assert choice.product.normed or lines[choice.line]["64"]["kernel"] != "apart"


@pytest.mark.usefixtures("empty_table", "_pretended_steps")
def test_a_later_run_for_other_rows_keeps_what_an_earlier_one_found(tmp_path: Path) -> None:
    """A line that the GPU's table lacks is written with all of its buckets, those of earlier runs among them."""
    arguments = tuner_arguments(tmp_path)
    tune_step.StepTuner(arguments, CONFIG, Group.single(torch.device("cpu"))).run()
    found = read_table(arguments.table)
    line = next(choice.line for choice in choices(CONFIG, 1, alone=False) if choice.product.name == "down")
    found[line][8] = MatmulConfig("skinny", 8, 16, 64, num_warps=4)
    merge_into_table({line: {"8": asdict(found[line][8])}}, arguments.table)
    load_table("").clear()  # as in a process of its own
    arguments.rows, arguments.log = [64], tmp_path / "another log"
    tune_step.StepTuner(arguments, CONFIG, Group.single(torch.device("cpu"))).run()
    assert read_table(arguments.table)[line][8] == found[line][8]


@pytest.mark.usefixtures("empty_table", "_pretended_steps")
def test_the_tuner_tries_products_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def two(choice: Choice) -> list[MatmulConfig]:
        return [MatmulConfig("skinny", 8, 32, 128, num_warps=warps) for warps in (2, 8)]

    monkeypatch.setattr(
        tune_step, "work", lambda arguments, config: [(one, 8, two(one)) for one in choices(config, 1, alone=False)]
    )
    arguments = tuner_arguments(tmp_path)
    tune_step.StepTuner(arguments, CONFIG, Group.single(torch.device("cpu"))).run()
    alone = json.loads(arguments.table.read_text())["matmul"]
    assert not any(line["8"]["num_warps"] == 2 for line in alone.values())
    arguments.together = 3
    tune_step.StepTuner(arguments, CONFIG, Group.single(torch.device("cpu"))).run()
    lines = json.loads(arguments.table.read_text())["matmul"]
    changed = {name.split()[1] for name, line in lines.items() if line["8"]["num_warps"] == 2}
    assert changed == {"1024x2048", "1024x3072"}
    assert "100.0 ->      76.0 us" in capsys.readouterr().out
